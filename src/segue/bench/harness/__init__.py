"""The one harness of all benchmarks: options and their commands, checkpoints, sides and their processes, hosts as
network namespaces, load, meters, statistics, rounds, scenarios, result files and reports.

Doors: `arguments`, `async_omni`, `checkpoint`, `device`, `hardware`, `library`, `load`, `meters`, `namespaces`,
`process`, `report`, `results`, `rounds`, `scenarios`, `server`, `stages`, `stats`.
"""
