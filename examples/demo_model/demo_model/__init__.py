"""Train small models, one in the published format of Qwen3-Omni and one that draws, from data that these scripts make.

`data` makes what they learn from, `training` is how they learn it, and the files beside them ask and measure.
"""
