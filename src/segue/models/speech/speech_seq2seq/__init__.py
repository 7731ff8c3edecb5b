"""Serves `transformers`' encoder-decoders that transcribe audio (Whisper): encoder, then decoder.

Doors: `family`.
"""
