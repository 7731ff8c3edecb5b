"""A request over a graph of models: `relay` runs its part for each model and hands on what that makes, `model_graph`
makes the parts.

Doors: `model_graph`.
"""
