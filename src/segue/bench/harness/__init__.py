"""Code shared by all benchmarks: arguments, checkpoints, sides as processes, load clients, meters, statistics, and the
format of result files and reports.

Doors: `arguments`, `async_omni`, `channel`, `checkpoint`, `child`, `hardware`, `load`, `load_report`, `load_results`,
`meters`, `one_loaded`, `result_file`, `stats`.
"""
