"""Families for speech: `speech_seq2seq` transcribes audio (Whisper), `csm` speaks a text.

Doors: the `family` of each.
"""
