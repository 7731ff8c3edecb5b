"""Z-Image (Tongyi-MAI): text to image, on diffusers' networks.

Doors: `family`.
"""
