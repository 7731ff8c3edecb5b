"""Linear layers: prepacked, fused, quantised, as experts of a mixture, and with LoRA adapters. `segue.kernels.prepare`
makes them; `stored` makes those of quantised checkpoints.

Doors: `layers`, `lora`, `stored`.
"""
