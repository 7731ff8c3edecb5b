"""CPU-specific code: kernels in C (`native`), the layers and the attention backend that call them, and recordings of
calls (`recorder`). `segue.kernels.cpu_kernels` alone looks for this folder. It can be removed: then torch's operators
run, as they do if the kernels were not compiled.

Doors: `door`, `native`.
"""
