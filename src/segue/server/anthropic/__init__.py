"""Anthropic's Messages API over chat completions: turns and blocks in (`blocks`, `request`), events out (`writer`).

Doors: `endpoint`, `request`.
"""
