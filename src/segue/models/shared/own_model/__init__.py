"""Bring a model of one's own: bases for the stages of a model that its author wrote for `transformers` and that no
family here knows. Packages outside import them: `docs/own-model.md` walks through them.

Doors: every module.
"""
