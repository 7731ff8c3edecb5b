"""`/v1/audio/speech`, `/v1/audio/transcriptions` and `/v1/audio/translations`.

Doors: `request`, `speech`, `speech_request`, `transcriptions`.
"""
