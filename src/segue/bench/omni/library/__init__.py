"""`generate` of `transformers` on each family of the benchmark: `reference` has what they share.
The baseline's process imports the module that `segue.bench.omni.families` names.
"""
