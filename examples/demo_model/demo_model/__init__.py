"""Train a small model in the published format of Qwen3-Omni from data that these scripts make themselves.

`scenes` and `questions` make what it sees and is asked, `speech` what it hears. `checkpoint` writes the untrained
model. `see` and `hear` train one part each; `training` is what they share.
"""
