"""Read checkpoints with quantised weights: AWQ, GPTQ, compressed-tensors, bitsandbytes, torchao. `formats` lists the
supported ones, `reader` plugs into the loader of `transformers`.

Doors: `formats`, `reader`.
"""
