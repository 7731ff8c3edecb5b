"""Write the untrained model in the published layout of Qwen3-Omni: config, tokenizer, processors, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from demo_model.data.questions import sentences
from demo_model.training.networks import language_model, vision
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
from segue.models.omni.qwen3_omni.tiny.config import ROLES, SPECIAL_TOKENS, Encoder, Shape, config_json
from segue.models.omni.qwen3_omni.tiny.presets import MODEL_SPECIFIC, PREPROCESSOR, TEMPLATE
from segue.models.shared.tiny.files import write_json
from segue.models.shared.tiny.qwen import write_qwen_tokenizer

PIXELS = 128 * 128
"""Every picture is scaled to about so many pixels: 16 tokens."""
SHAPE = Shape(
    thinker_hidden=256,
    thinker_layers=4,
    thinker_heads=(8, 2),
    thinker_experts=(8, 2, 192),
    talker_hidden=192,
    talker_layers=4,
    talker_heads=(6, 2),
    talker_experts=(4, 2, 160),
    head_dim=32,
    accepted_layer=2,
    audio=Encoder(4, 192, 6, 576),
    downsample=64,
    vision=Encoder(4, 192, 6, 576),
    deep_layers=(1,),
    position_rows=64,
    codebook=256,
    code_groups=8,
    predictor_layers=3,
    predictor_heads=(6, 2),
    predictor_intermediate=384,
    vocoder_hidden=192,
    vocoder_layers=3,
    vocoder_heads=6,
    vocoder_intermediate=384,
    vocoder_channels=128,
)
"""About 19 million parameters."""
EMBEDDED = 0.3
"""Deviation of the thinker's embeddings of tokens, which are never trained."""


def create(directory: Path, seed: int = 0) -> None:
    """Write the untrained checkpoint, float32; equal seeds give equal files."""
    directory.mkdir(parents=True, exist_ok=True)
    # the library takes a `size` of the tokenizer's file for pictures and clips alike; it enlarges clips otherwise
    tokenizer = write_qwen_tokenizer(
        directory,
        SPECIAL_TOKENS,
        ROLES,
        texts=sentences(),
        extra_special_tokens=MODEL_SPECIFIC,
        **MODEL_SPECIFIC,
        processor_class="Qwen3OmniMoeProcessor",
        size={"shortest_edge": PIXELS, "longest_edge": PIXELS},
    )
    config = config_json(SHAPE, {role: tokenizer.get_vocab()[role] for role in ROLES})
    write_json(directory, "config.json", config)
    end = config["im_end_token_id"]
    write_json(directory, "generation_config.json", {"eos_token_id": end, "transformers_version": "5.23.0"})
    write_json(directory, "preprocessor_config.json", PREPROCESSOR | {"min_pixels": PIXELS, "max_pixels": PIXELS})
    write_json(directory, "chat_template.json", {"chat_template": TEMPLATE.read_text()})
    torch.manual_seed(seed)
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**config))
    for module in vision(model).modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            _draw(module, module.weight[0].numel())  # the library's deviation is that of networks ten times as wide
    nn.init.normal_(language_model(model).embed_tokens.weight, std=EMBEDDED)
    prepare_vocoder(model.code2wav)
    model.save_pretrained(directory)


def prepare_vocoder(code2wav: Any) -> None:
    """Draw a vocoder's weights so that sound and gradients keep their size from layer to layer.

    The library draws all from one narrow distribution, with which its convolutions let next to nothing through.
    """
    for name, module in code2wav.named_modules():
        if isinstance(module, nn.ConvTranspose1d):
            _draw(module, module.in_channels * module.kernel_size[0] / module.stride[0])
        elif isinstance(module, nn.Conv1d):
            terms = module.in_channels // module.groups * module.kernel_size[0]
            _draw(module, 10 * terms if "conv2" in name else terms)  # the end of a residual unit, which adds a little
        elif isinstance(module, nn.Linear):
            _draw(module, module.in_features)
        for part in ("gamma", "scale"):  # of what other residual units add
            if hasattr(module, part):
                nn.init.constant_(getattr(module, part), 0.1)
    _draw(code2wav.decoder[-1].conv, 100 * code2wav.decoder[-1].conv.weight[0].numel())  # sound is soft


def _draw(module: nn.Conv1d | nn.Conv3d | nn.ConvTranspose1d | nn.Linear, terms: float) -> None:
    """For outputs of about the inputs' size, each of so many terms."""
    nn.init.normal_(module.weight, std=terms**-0.5)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
