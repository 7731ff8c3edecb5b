"""The stage graph of a model as a value (`stage_graph`, made of `parts`, validated by `checks`), the stages that one
request needs (`walk`), its visits to them (`course`), and the deployment of the graph: `deployment` reads the file,
`kinds` describes the engine kinds with their keys and plans, `machine` detects the host's hardware, and `plan` gives
every stage its worker, devices and connectors. `plugins` loads what installed packages register, `functions` what a
graph of models names. This package imports no torch.

Doors: `stage_graph`, `parts`, `checks`, `walk`, `course`, `functions`, `plugins`, `render`, `deployment`, `kinds`,
`machine`.
"""
