"""Wan 2.1 and 2.2 (Wan-AI): text and images to video, on diffusers' networks.

Doors: `family`.
"""
