"""`segue tiny higgs-audio-v2`: makes a small checkpoint in the published layout."""
