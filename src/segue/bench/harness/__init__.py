"""The one harness of all benchmarks: options and their commands, sides and their processes, hosts as network
namespaces, load, meters, statistics, result files and reports.

Doors: `arguments`, `async_omni`, `device`, `hardware`, `library`, `load`, `meters`, `namespaces`, `process`, `report`,
`results`, `rounds`, `stats`.
"""
