"""CPU-specific code: kernels in C (`native`) and the modules that call them. Each has a counterpart in torch that runs
if they were not compiled.

Doors: `full_attention`, `gated_mlp`, `kept_rows`, `native`, `native_attention`, `norms`.
"""
