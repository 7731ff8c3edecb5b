"""`/v1/videos`: stores jobs on disk (`store`) and runs a few at a time (`runner`).

Doors: `endpoint`, `request`.
"""
