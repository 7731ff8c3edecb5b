"""Detect behaviour of the installed transformers by running it, where versions differ.

Optional reading: checks a checkpoint at load.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniTalkerConfig, Qwen2_5OmniTalkerForConditionalGeneration

_CONFIG: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "embedding_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    "tts_codec_start_token_id": 1,
    "tts_codec_end_token_id": 2,
    "tts_codec_pad_token_id": 3,
    "tts_codec_mask_token_id": 4,
    "tts_text_start_token_id": 5,
    "tts_text_end_token_id": 6,
    "tts_text_pad_token_id": 7,
    "vision_start_token_id": 8,
    "vision_end_token_id": 9,
    "audio_start_token_id": 10,
    "audio_end_token_id": 11,
}


@cache
def generate_drops_mask() -> bool:
    """Whether `generate` drops an attention mask of ones before the talker's `forward` sees it.

    Runs one step of a talker of hidden size 8, which takes milliseconds.
    """
    with torch.random.fork_rng(devices=[]):  # the random weights must not advance the caller's random state
        talker = Qwen2_5OmniTalkerForConditionalGeneration(Qwen2_5OmniTalkerConfig(**_CONFIG)).eval()
    seen: list[bool] = []

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(kwargs.get("attention_mask") is not None)

    talker.register_forward_pre_hook(note, with_kwargs=True)
    ids = torch.zeros(1, 2, dtype=torch.long)
    rows = torch.zeros(1, 2, 8)
    talker.generate(
        input_ids=ids,
        input_text_ids=ids,
        inputs_embeds=rows,
        thinker_reply_part=rows,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        pad_token_id=3,
    )
    return not seen[0]
