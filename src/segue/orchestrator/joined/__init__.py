"""A request over a graph of models: `relay` runs its part for each model and hands on what that makes, `model_graph`
makes the parts.

Optional reading: `ServedGraph` stands in the place of a model for the server.

Doors: `model_graph`.
"""
