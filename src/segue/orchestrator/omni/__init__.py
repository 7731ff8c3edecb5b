"""The Python API: `async_omni` runs a model from async Python, `blocking` is its form for scripts. `outputs` are what
callers get, `progress` shows a bar in a terminal.

Optional reading: the Python API, beside the server.

Doors: every module.
"""
