"""Deployment files. `written` and `section` read a file, with errors that name the key; `deployment` has the plan that
the rest of Segue reads, `options` the LoRA and speculation keys, and `loader` makes a plan from a file and a graph.

Doors: `deployment`, `loader`, `options`, `section`, `written`.
"""
