"""FLUX.1 and FLUX.1 Kontext (black-forest-labs): text to image, image to image, editing, on diffusers' networks.

Doors: `family`.
"""
