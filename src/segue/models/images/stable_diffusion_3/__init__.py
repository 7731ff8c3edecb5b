"""Stable Diffusion 3 and 3.5 (stabilityai): text to image, on diffusers' networks.

Doors: `family`.
"""
