"""The stage graph of a model as a value (`stage_graph`, made of `parts`, validated by `checks`), the stages that one
request needs (`walk`), and the deployment of the graph: `deployment` reads the file, `machine` detects the host's
hardware, and `plan` gives every stage its worker, devices and connectors. This package imports no torch.

Doors: `stage_graph`, `parts`, `render`, `deployment`, `machine`.
"""
