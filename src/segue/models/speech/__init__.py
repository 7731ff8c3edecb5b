"""Families for speech: `speech_seq2seq` transcribes audio (Whisper), `qwen3_tts` says a text.

Doors: the `family` of each.
"""
