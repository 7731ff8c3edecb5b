"""`segue tiny pocket-tts`: makes a small checkpoint in the library's layout."""
