"""Write small checkpoints in published formats, with random weights that behave.

Doors: `classifiers`, `files`, `made`, `qwen`, `sizes`, `weights`.
"""
