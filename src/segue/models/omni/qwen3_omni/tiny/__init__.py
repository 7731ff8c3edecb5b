"""`segue tiny qwen3-omni`: makes a small checkpoint in the published layout."""
