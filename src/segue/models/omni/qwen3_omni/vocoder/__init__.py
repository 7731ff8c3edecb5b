"""The vocoder of Qwen3-Omni: `network` runs the library's Code2Wav over pieces of utterances, `vocoder` is the stage.

Doors: `vocoder`.
"""
