"""Deployment files. `written` and `section` read a file, with errors that name the key; `deployment` has the plan that
the rest of Segue reads, `stage_plan` what it has for every stage, `options` the keys with a form of their own, and
`loader` makes a plan from a file and a graph.

Doors: `deployment`, `loader`, `options`, `section`, `stage_plan`, `written`.
"""
