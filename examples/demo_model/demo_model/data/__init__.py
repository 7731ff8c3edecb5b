"""What the training learns from: the world, what is said of it, and batches of both.

`scenes`, `questions`, `captions` and `speech` make it, and `prompts` encodes it. The other files make batches, each for
one or two parts of the training, from a step's number alone.
"""

IGNORED = -100
"""As a target: counts for nothing (`torch.nn.functional.cross_entropy`)."""
