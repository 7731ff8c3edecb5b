"""Run requests over the graph: `orchestrator` admits requests, sends each through its stages (`stage_messages`) and
recovers the requests of a lost worker; `workers` starts, watches and chooses workers; `omni` and `blocking` are the
Python API; `service` is the server's interface, `tokenless` what a deployment without a tokenizer refuses. `served` is
a model as requests see it; `kept` retains requests that others go on from; `joined` runs a request over a graph of
models; `spoken` says a text while it arrives. The package talks to workers only through `messages`.

Doors: `blocking`, `omni`, `orchestrator`, `outputs`, `progress`, `service`, `serving`, `spoken`, `tokenless`,
`workers`.
"""
