"""Convolutions over a signal that arrives in chunks.

Doors: `streaming_conv`.
"""
