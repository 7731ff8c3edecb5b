"""Families for speech: `speech_seq2seq` transcribes audio (Whisper).

Doors: the `family` of each.
"""
