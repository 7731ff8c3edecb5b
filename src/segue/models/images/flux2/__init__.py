"""FLUX.2 and FLUX.2 Klein (black-forest-labs): text to image with optional reference images, on diffusers' networks.

Doors: `family`.
"""
