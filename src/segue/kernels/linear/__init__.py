"""Linear layers: prepacked, fused, quantised, as experts of a mixture, and with LoRA adapters.

Doors: `experts`, `fused_linear`, `grouped_linear`, `linear`, `lora`, `quantized`, `rounded_linear`, `scaled_linear`.
"""
