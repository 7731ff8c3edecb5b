"""Backends of attention over a paged store: `choose` builds the one that a deployment names. `triton` has Segue's own
kernels (`triton_kernels`); `flex`, `flashinfer` and `flash_attn` call the libraries of these names. The one for CPUs is
in `segue.kernels.cpu`.

Doors: `choose`, `triton`.
"""
