"""The torch half of the family. What leaves over each edge is in `segue.models.diffusion.transfers`; the item of a text
is `{"ids", "drop", "most"}` (`input`), what it becomes `{"embeds": [tokens, hidden]}`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from segue.engines.contract import Transfer
from segue.models.diffusion.transfers import settings, texts, whole
from segue.models.qwen_image.decoder import QwenImageDecoder
from segue.models.qwen_image.denoiser import QwenImageDenoiser
from segue.models.qwen_image.input import Input
from segue.models.qwen_image.text_encoder import Encoder

ADAPTERS: dict[str, Callable[..., Any]] = {
    "input": Input,
    "text_encoder": Encoder,
    "denoiser": QwenImageDenoiser,
    "decoder": QwenImageDecoder,
}
TRANSFERS: dict[tuple[str, str], Transfer] = {
    ("input", "text_encoder"): texts,
    ("input", "denoiser"): settings,
    ("text_encoder", "denoiser"): whole,
    ("denoiser", "decoder"): whole,
}
