"""`segue tiny bagel`: makes a small checkpoint in the published layout."""
