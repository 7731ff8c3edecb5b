"""`segue tiny mimo-audio`: makes a small checkpoint in the published layout."""
