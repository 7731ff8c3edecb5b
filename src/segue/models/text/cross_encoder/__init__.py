"""Serves cross-encoders, which score a pair of texts, as one stage.

Doors: `family`.
"""
