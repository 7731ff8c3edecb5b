"""Qwen-Image (QwenLM/Qwen-Image): text to image, on diffusers' networks.

Doors: `family`.
"""
