"""`/v1/audio/speech`, the websocket `/v1/audio/speech/stream`, `/v1/audio/transcriptions` and `/v1/audio/translations`.

Doors: `request`, `speech`, `speech_request`, `speech_session`, `transcriptions`.
"""
