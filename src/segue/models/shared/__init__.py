"""Code that several families use, by subject: `checkpoint` and `packed` read weights, `decoder` runs a text decoder
under paged attention, `text` builds prompts, `dialects` parse tool calls and reasoning, `diffusion` has the stages of
image families, `speech` streaming vocoders, `speculators` the draft heads, `own_model` bases for an author's own
model, and `tiny` writes small checkpoints.

Doors: every module and package.
"""
