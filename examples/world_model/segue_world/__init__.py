"""Serves a model that no library has: a small video model that takes an action for each frame."""
