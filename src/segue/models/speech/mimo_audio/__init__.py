"""MiMo-Audio (Xiaomi): reads text and speech, and writes text and speech, by a language model over patches of codes.
Read `graph`, then `stages`.

In neither transformers nor diffusers: the three decoders are the library's Qwen2, the tokenizer of audio is plain torch
(`codec`); everything else is written here, and compared with tensors of the published code.

Doors: `family`, `config`, `input`, `loading`, `tokens`.
"""
