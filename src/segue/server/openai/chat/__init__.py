"""`/v1/chat/completions`: converts the body to checked requests (`request`, with `template` and `tools`), and builds
the answer, whole (`reply`) or as events (`stream`).

Doors: `endpoint`, `reply`, `request`, `template`, `tools`.
"""
