"""`/v1/audio/transcriptions` and `/v1/audio/translations`.

Doors: `request`, `transcriptions`.
"""
