"""`segue tiny qwen2.5-omni`: makes a small checkpoint in the published layout.

Optional reading: random checkpoints for tests.
"""
