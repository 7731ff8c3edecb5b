"""Engines. An engine runs one stage: it batches requests and calls the stage's model in every `step`. There is one per
kind of stage (`autoregressive`, `diffusion`, `module`). `contract` is the interface of every engine to its worker,
`entries` the request state that two of them share, `ranks` what makes the engines of several ranks equal. Engines know
no model and no connector.

Doors: `contract`, `ranks`, `autoregressive`, `diffusion`, `module`.
"""
