"""Linear layers: prepacked, fused, quantised, as experts of a mixture, and with LoRA adapters. `segue.kernels.prepare`
makes them; `stored` makes those of quantised checkpoints. Outside `segue.kernels`, only `layers`, `lora` and `stored`
are used.

Doors: `experts`, `fused_linear`, `grouped_linear`, `kept_rows`, `layers`, `linear`, `lora`, `patches`, `quantized`,
`stored`.
"""
