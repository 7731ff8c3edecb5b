"""Serves text classifiers as one stage.

Doors: `family`.
"""
