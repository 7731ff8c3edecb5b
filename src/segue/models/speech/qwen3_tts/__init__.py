"""Qwen3-TTS (12 Hz): says a text in a voice. Read `graph`, then `stages`.

In neither transformers nor diffusers: the talker is the library's Qwen3 decoder under the checkpoint's own names, the
vocoder is built of the layers of Qwen3-Omni's; the prompt and everything else is written here, and compared with
tensors of the public package `qwen-tts`.

Doors: `family`.
"""
