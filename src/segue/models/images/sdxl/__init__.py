"""Stable Diffusion XL: two CLIP text encoders, a UNet, a VAE.

Doors: `family`.
"""
