"""What a prompt of the model is: tokens of its words, and places for what is to be seen and heard."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.data.questions import STYLES
from demo_model.data.scenes import SIDE

PATCH, MERGE, FRAMES_PER_PATCH = 16, 2, 2
CHUNK = 100
"""Spectra that the audio encoder's convolutions take at once."""
ROWS = 13
"""Rows that they give for them."""
TOKEN = PATCH * MERGE
"""Pixels of a picture's side that one token stands for."""
GRID = SIDE // TOKEN


@cache
def tokenizer(directory: Path) -> Tokenizer:
    """What lies there as `tokenizer.json`."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@lru_cache(100_000)
def encode(model_dir: Path, text: str) -> Tensor:
    """int64 [tokens]."""
    return torch.tensor(tokenizer(model_dir).encode(text).ids)


@cache
def prefix(model_dir: Path, kind: str, style: str) -> tuple[Tensor, Tensor]:
    """Ids and positions [3, tokens] of a prompt up to where the question begins."""
    from transformers import AutoConfig

    from segue.models.omni.qwen3_omni.library import Qwen3OmniMoePreTrainedModelForConditionalGeneration
    from segue.models.shared.omni.positions import MediumFacts, positions_of

    system = f"<|im_start|>system\n{STYLES[style]}<|im_end|>\n" if style else ""
    count = {"picture": GRID**2, "clip": 4 * GRID**2, "nothing": 0}[kind]
    pad = {"picture": "<|image_pad|>", "clip": "<|video_pad|>", "nothing": ""}[kind]
    media = f"<|vision_start|>{pad * count}<|vision_end|>" if count else ""
    ids = encode(model_dir, f"{system}<|im_start|>user\n{media}")
    config = AutoConfig.from_pretrained(model_dir).thinker_config
    grid = (count // GRID**2, SIDE // PATCH, SIDE // PATCH)
    seen = {"picture": [MediumFacts("image", b"", grid)], "clip": [MediumFacts("video", b"", grid, 1.0)], "nothing": []}
    place = positions_of(Qwen3OmniMoePreTrainedModelForConditionalGeneration, config)
    positions, _ = place(ids, seen[kind], use_audio_in_video=False)
    return ids, positions


def rows_of(count: int) -> int:
    """Rows that the audio encoder gives for so many spectra (the library's `_get_feat_extract_output_lengths`)."""
    left = count % CHUNK
    for _ in range(3):
        left = (left - 1) // 2 + 1
    return left + count // CHUNK * ROWS


def placeholder(length: int) -> str:
    """What stands in a prompt for a recording of so many spectra."""
    return f"<|audio_start|>{'<|audio_pad|>' * rows_of(length)}<|audio_end|>"
