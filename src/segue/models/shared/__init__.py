"""Code that several families use, by subject: `checkpoint` reads weights, `decoder` runs a text decoder under paged
attention, `text` builds prompts, `dialects` parse tool calls and reasoning, `diffusion` has the stages of image
families, `omni` those before a thinker, `speech` streaming vocoders, `own_model` bases for an author's own model, and
`tiny` writes small checkpoints.

Doors: every module and package.
"""
