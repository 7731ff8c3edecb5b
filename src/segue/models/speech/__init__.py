"""Families for speech: `speech_seq2seq` transcribes audio (Whisper); `csm`, `higgs_audio_v2`, `pocket_tts` and
`qwen3_tts` say a text; `mimo_audio` reads and writes text and speech.

Doors: the `family` of each, `mimo_audio`.
"""
