"""The formats in which models write tool calls and reasoning, and parsers for streamed text. No torch here.

Doors: `dialect`, `pieces`.
"""
