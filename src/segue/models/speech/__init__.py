"""Families for speech: `speech_seq2seq` transcribes audio (Whisper), `csm` and `qwen3_tts` say a text.

Doors: the `family` of each.
"""
