"""Serves any other pipeline of diffusers, by its modular blocks or by calling the library's pipeline as a whole.

Doors: `family`.
"""
