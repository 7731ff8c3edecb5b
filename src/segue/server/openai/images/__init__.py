"""`/v1/images`: converts the body to a checked request (`request`) and builds the answer (`reply`).

Doors: `endpoint`, `names`, `request`.
"""
