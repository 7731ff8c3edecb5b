"""The one harness of all benchmarks: options and their commands, sides and their processes, load, meters, statistics,
result files and reports.

Doors: `arguments`, `async_omni`, `device`, `hardware`, `library`, `load`, `meters`, `process`, `report`, `results`,
`stats`.
"""
