"""Families for speech: `speech_seq2seq` transcribes audio (Whisper), `csm` and `qwen3_tts` say a text,
`mimo_audio` reads and writes text and speech.

Doors: the `family` of each, `mimo_audio`.
"""
