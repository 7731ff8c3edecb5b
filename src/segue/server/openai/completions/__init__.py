"""`/v1/completions`: converts the body to checked requests (`request`) and builds the answer (`reply`).

Doors: `endpoint`, `request`.
"""
