"""`/v1/chat/completions`: converts the body to checked requests (`request`, with `template` and `tools`), and builds
the answer, whole (`reply`) or as events (`stream`). `session` is the websocket on which input is appended.

Doors: `endpoint`, `reply`, `request`, `session`, `template`, `tools`.
"""
