"""Run requests over the graph: `orchestrator` admits requests, sends each through its stages and recovers the requests
of a lost worker; `requests` has what is known of each; `workers` starts, watches and chooses workers; `omni` is the
Python API; `service` is the server's interface; `serving` turns checkpoints into what serves them; `tokenless` says
what a deployment without a tokenizer refuses, `transcription` runs speech recognition in pieces. `served` is a model as
requests see it, `model_card` what it tells of itself; `joined` runs a request over a graph of models; `spoken` says a
text while it arrives. The package talks to workers only through `messages`.

Doors: `omni`, `orchestrator`, `service`, `serving`, `spoken`, `tokenless`, `workers`.
"""
