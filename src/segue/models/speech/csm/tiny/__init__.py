"""`segue tiny csm`: makes a small checkpoint in the published layout."""
