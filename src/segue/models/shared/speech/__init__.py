"""Streaming vocoders: `pieces` carries the state of a causal network from one piece of an utterance to the next,
`vocoder` is the stage that cuts utterances into pieces.

Doors: `pieces`, `vocoder`.
"""
