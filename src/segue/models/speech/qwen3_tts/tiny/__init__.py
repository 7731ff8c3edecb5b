"""`segue tiny qwen3-tts`: makes a small checkpoint in the published layout."""
