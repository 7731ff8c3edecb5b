"""`segue tiny flux2`, `flux2-klein`, `flux2-klein-distilled`: write small checkpoints in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from segue.models.family import TinyPreset
from segue.models.shared.diffusion.library import LIBRARIES, AutoConfig, PreTrainedModel
from segue.models.shared.diffusion.tiny import (
    JOINT_GAINS,
    QWEN_SPECIAL,
    QWEN_TEMPLATE,
    Part,
    randomise,
    scale_to,
    write_index,
    write_qwen_tokenizer,
    write_tokenizer,
)
from segue.models.shared.tiny.files import BASE_VOCAB, train_tokenizer, write_json
from segue.models.shared.tiny.sizes import check_size

PARTS: Mapping[str, Part] = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Mistral3ForConditionalGeneration"),
    "tokenizer": ("transformers", "PixtralProcessor"),
    "transformer": ("diffusers", "Flux2Transformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLFlux2"),
}
KLEIN_PARTS: Mapping[str, Part] = {
    **PARTS,
    "text_encoder": ("transformers", "Qwen3ForCausalLM"),
    "tokenizer": ("transformers", "Qwen2TokenizerFast"),
}
SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]",
)  # fmt: skip
TEMPLATE = (
    "{{- '<s>' }}{%- for message in messages %}"
    "{%- set kind = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}"
    "{{- '[' + kind + ']' }}"
    "{%- for part in message.content %}{{- part.text if part.type == 'text' else '[IMG]' }}{%- endfor %}"
    "{{- '[/' + kind + ']' }}{%- endfor %}"
)


@dataclass(frozen=True)
class _Small:
    """One size of the denoiser."""

    layers: int
    single: int
    heads: int
    rope: tuple[int, int, int, int]
    """Dimensions of a head per position axis."""


SIZES: Mapping[str, _Small] = {
    "tiny": _Small(2, 2, 2, (4, 4, 4, 4)),
    "small": _Small(4, 12, 6, (16, 16, 16, 16)),
}
_WIDTH = 32
"""Hidden size of the text encoder."""
_LATENTS = 32
"""Channels of the VAE's latents."""
_PREDICTION_STD = 1.0
_PIXEL_STD = 0.5
"""Target standard deviation of pixels in [-1, 1]."""


def make(directory: Path, size: str = "tiny", seed: int = 0, *, klein: bool = False, distilled: bool = False) -> None:
    """Write a checkpoint with random weights; equal size and seed give equal files.

    `klein`: the kind with Qwen 3; `distilled`: its variant for few steps without guidance. Raises `InvalidRequest` for
    an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    if klein:
        write_index(directory, "Flux2KleinPipeline", KLEIN_PARTS, is_distilled=distilled)
    else:
        write_index(directory, "Flux2Pipeline", PARTS)
    with torch.random.fork_rng(devices=[]):  # the libraries first draw weights of their own
        if klein:
            _make_qwen(directory, seed)
        else:
            make_mistral(directory, "Mistral3ForConditionalGeneration", seed)
            write_processor(directory / "tokenizer")
        _make_transformer(directory, SIZES[size], seed + 1, embeds=not klein)
        make_vae(directory / "vae", seed + 2)
    scheduler = LIBRARIES["diffusers"].FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, shift=3.0, base_shift=0.5, max_shift=1.15
    )
    scheduler.save_pretrained(directory / "scheduler")


def write_processor(directory: Path) -> None:
    """Write Pixtral's processor of tokens and images."""
    more = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "chat_template": TEMPLATE,
        "processor_class": "PixtralProcessor",
    }
    write_tokenizer(directory, train_tokenizer(SPECIAL), SPECIAL, "PreTrainedTokenizerFast", longest=4096, **more)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    images = {
        "image_processor_type": "PixtralImageProcessor",
        "processor_class": "PixtralProcessor",
        "size": {"longest_edge": 112},
        "patch_size": 14,
    }
    write_json(directory, "preprocessor_config.json", images)
    shapes = {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2, "image_token": "[IMG]"}
    write_json(directory, "processor_config.json", shapes)


def make_mistral(directory: Path, kind: str, seed: int) -> None:
    """Write a text encoder of class `kind`, with enough layers for those that are read."""
    ids = {token: BASE_VOCAB + place for place, token in enumerate(SPECIAL)}
    config = AutoConfig.for_model(
        "mistral3",
        text_config={
            "model_type": "mistral",
            **_text_config(32),
            "sliding_window": None,
            "bos_token_id": ids["<s>"],
            "eos_token_id": ids["</s>"],
            "pad_token_id": ids["<pad>"],
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 112,
            "patch_size": 14,
        },
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    _write_text_encoder(directory, getattr(LIBRARIES["transformers"], kind)(config), seed)


def _make_qwen(directory: Path, seed: int) -> None:
    ids = {token: BASE_VOCAB + place for place, token in enumerate(QWEN_SPECIAL)}
    config = AutoConfig.for_model(
        "qwen3",
        **_text_config(29),
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        tie_word_embeddings=True,
    )
    _write_text_encoder(directory, LIBRARIES["transformers"].Qwen3ForCausalLM(config), seed)
    write_qwen_tokenizer(directory / "tokenizer", QWEN_SPECIAL, chat_template=QWEN_TEMPLATE)


def _text_config(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 672,
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    }


def _write_text_encoder(directory: Path, model: PreTrainedModel, seed: int) -> None:
    model.eval()
    randomise(model, seed, {r"\.[qk]_norm\.": 2.0, r"\.[qk]_proj\.": 1.6, r"\.o_proj\.": 2.0, r"\.down_proj\.": 0.7})
    model.save_pretrained(directory / "text_encoder")


def _make_transformer(directory: Path, small: _Small, seed: int, *, embeds: bool) -> None:
    network = LIBRARIES["diffusers"].Flux2Transformer2DModel(
        in_channels=4 * _LATENTS,
        num_layers=small.layers,
        num_single_layers=small.single,
        attention_head_dim=sum(small.rope),
        num_attention_heads=small.heads,
        joint_attention_dim=3 * _WIDTH,
        timestep_guidance_channels=32,
        axes_dims_rope=small.rope,
        guidance_embeds=embeds,
    )
    network.eval()
    randomise(network, seed, {**JOINT_GAINS, "^x_embedder": 0.5})
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "hidden_states": torch.randn(2, 16, 4 * _LATENTS, generator=generator),
        "encoder_hidden_states": torch.randn(2, 12, 3 * _WIDTH, generator=generator),
        "timestep": torch.tensor([0.3, 0.9]),
        "guidance": torch.tensor([3.5, 3.5]) if embeds else None,
        "img_ids": torch.zeros(16, 4),
        "txt_ids": torch.zeros(12, 4),
    }
    with torch.no_grad():
        measured = network(**inputs, return_dict=False)[0].std()
        network.proj_out.weight.mul_(_PREDICTION_STD / measured)
    network.save_pretrained(directory / "transformer")


def make_vae(directory: Path, seed: int) -> None:
    """Write a VAE with 8 pixels per latent, and statistics that differ from the initial ones."""
    vae = LIBRARIES["diffusers"].AutoencoderKLFlux2(
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=_LATENTS,
        norm_num_groups=4,
        sample_size=256,
    )
    vae.eval()
    randomise(vae, seed)
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(2, _LATENTS, 8, 8, generator=generator)
    images = torch.rand(2, 3, 64, 64, generator=generator) * 2 - 1
    scale_to(_PIXEL_STD, vae.decoder.conv_out, lambda: vae.decode(latents, return_dict=False)[0])
    scale_to(1.0, vae.encoder.conv_out, lambda: vae.encoder(images)[:, :_LATENTS])
    with torch.no_grad():
        vae.bn.running_mean.copy_(0.2 * torch.randn(4 * _LATENTS, generator=generator))
        vae.bn.running_var.copy_(0.7 + 0.6 * torch.rand(4 * _LATENTS, generator=generator))
    vae.save_pretrained(directory)


PRESETS = {
    "flux2": TinyPreset(tuple(SIZES), make),
    "flux2-klein": TinyPreset(tuple(SIZES), partial(make, klein=True)),
    "flux2-klein-distilled": TinyPreset(tuple(SIZES), partial(make, klein=True, distilled=True)),
}
