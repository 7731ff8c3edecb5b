"""Turns logits into tokens. `draw` handles the sequences of a step, `sampler` draws (and `codes` the rest of a row),
`penalties` and `thinking` change logits first, `logprobs` and `prompt_logprobs` report probabilities, `detokenize`
makes text and finds stop strings.

Doors: `codes`, `detokenize`, `draw`, `logprobs`, `penalties`, `prompt_logprobs`, `sampler`, `thinking`.
"""
