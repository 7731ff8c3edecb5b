"""Load each stage's part of a Qwen3-TTS checkpoint.

Names in published checkpoints (Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice, …): `talker.model.*` (decoder, codec and text
embedding), `talker.text_projection.*`, `talker.codec_head`, `talker.code_predictor.*`; in `speech_tokenizer/`
`decoder.*` and `encoder.*`, which is not read.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import torch

from segue.engines.contract import LoadContext
from segue.models.shared.checkpoint.checkpoint import Checkpoint, load_module
from segue.models.speech.qwen3_tts.config import SPEECH_TOKENIZER, Config, Vocoder
from segue.models.speech.qwen3_tts.networks import CodesToWave, TalkerNet

_TALKER_NAMES = (
    (r"^decoder\.model\.embed_tokens\.", "model.codec_embedding."),
    (r"^decoder\.lm_head\.", "codec_head."),
    (r"^decoder\.model\.", "model."),
    (r"^text_embedding\.", "model.text_embedding."),
    (r"^code_predictor\.codec_embedding\.", "code_predictor.model.codec_embedding."),
)
_VOCODER_NAMES = (
    (r"^(rvq_\w+)\.layers\.(\d+)\.", r"quantizer.\1.vq.layers.\2._codebook."),
    (r"^(rvq_\w+)\.output_proj\.", r"quantizer.\1.output_proj."),
    (r"^decoder\.([1-9]\d*)\.(\d+)\.", r"decoder.\1.block.\2."),
)


def talker_name(name: str) -> str:
    """A parameter of `TalkerNet` → its published name."""
    return f"talker.{_renamed(name, _TALKER_NAMES)}"


def vocoder_name(name: str) -> str:
    """A parameter of `CodesToWave` → its published name."""
    return f"decoder.{_renamed(name, _VOCODER_NAMES)}"


def load_talker(ctx: LoadContext, config: Config) -> TalkerNet:
    """Talker and code predictor. Raises `ConfigError` with the missing tensor."""

    def located(name: str) -> Sequence[str]:
        return (talker_name(name),)

    return load_module(
        ctx,
        lambda: TalkerNet(config.talker_config),
        located,
        checkpoint=None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir),
        seed=zlib.crc32(b"talker"),
    )


def load_vocoder(ctx: LoadContext, vocoder: Vocoder) -> CodesToWave:
    """The vocoder, always in float32. Raises `ConfigError` with the missing tensor."""

    def located(name: str) -> Sequence[str]:
        return (vocoder_name(name),)

    return load_module(
        ctx,
        lambda: CodesToWave(vocoder.decoder_config),
        located,
        checkpoint=None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir / SPEECH_TOKENIZER),
        dtype=torch.float32,
        seed=zlib.crc32(b"vocoder"),
    )


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, new in rules:
        renamed, count = re.subn(pattern, new, name)
        if count:
            return renamed
    return name
