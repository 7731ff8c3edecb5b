"""What the model reads: `passages` of text and images, as the engine's prompt (`prompts`). `images` makes each image
what the two encoders take, at a size of `sizes`; `drawn` are images of a reply on their way back.

Doors: every module.
"""
