"""Networks that draft tokens for a language model: EAGLE, Medusa, multi-token prediction.

Doors: `eagle`, `medusa`, `mtp`.
"""
