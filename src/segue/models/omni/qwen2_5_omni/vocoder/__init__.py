"""Token2Wav as a streaming stage: codes to mel frames by flow matching (`dit`), mel frames to audio (`bigvgan`).

Doors: `vocoder`.
"""
