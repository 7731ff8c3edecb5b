"""`segue tiny qwen-image | qwen-image-edit | qwen-image-edit-plus`: write a small checkpoint in the published
layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from segue.models.family import TinyPreset
from segue.models.shared.diffusion.library import LIBRARIES, AutoConfig
from segue.models.shared.diffusion.tiny import (
    JOINT_GAINS,
    RopeSize,
    randomise,
    scale_to,
    write_index,
    write_qwen_tokenizer,
)
from segue.models.shared.tiny.files import BASE_VOCAB, write_json
from segue.models.shared.tiny.sizes import check_size

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
PARTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "transformer": ("diffusers", "QwenImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLQwenImage"),
}
PROCESSOR = ("transformers", "Qwen2VLProcessor")
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12544,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""As published, except `max_pixels`."""


SIZES: Mapping[str, RopeSize] = {"tiny": RopeSize(3, 2, (4, 6, 6)), "small": RopeSize(16, 6, (16, 24, 24))}
"""`small` is for benchmarks: matmuls dominate its time, as in the published one."""
_DEEP_GAINS: Mapping[str, float] = {
    r"\.norm_(added_)?[qk]\.": 1.5,
    r"\.to_(add_)?out\.": 0.5,
    r"_mlp\.net\.2\.": 0.3,
}
"""For many blocks: with `JOINT_GAINS` they amplify rounding until two computations of an image share nothing. With
these gains, changing the noise by 1e-6 changes pixels by 3e-7 on average after 12 guided steps, another prompt by
0.03."""
_HIDDEN = 64
"""Hidden size of the text encoder."""
_PREDICTION_STD = 1.0
_PIXEL_STD = 0.5
"""Target standard deviation of pixels in [-1, 1]."""


def make(directory: Path, size: str = "tiny", seed: int = 0, pipeline: str = "QwenImagePipeline") -> None:
    """Write a checkpoint with random weights; equal size, seed and pipeline give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    edits = pipeline != "QwenImagePipeline"
    write_index(directory, pipeline, {**PARTS, "processor": PROCESSOR} if edits else PARTS)
    for folder in ("tokenizer", "processor") if edits else ("tokenizer",):
        write_qwen_tokenizer(directory / folder, SPECIAL)
    if edits:
        write_json(directory / "processor", "preprocessor_config.json", PREPROCESSOR)
    with torch.random.fork_rng(devices=[]):  # the libraries first draw weights of their own
        _make_text_encoder(directory, seed)
        _make_transformer(directory, SIZES[size], seed + 1)
        _make_vae(directory, seed + 2)
    diffusers = LIBRARIES["diffusers"]
    diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    ).save_pretrained(directory / "scheduler")


def _make_text_encoder(directory: Path, seed: int) -> None:
    ids = {token: BASE_VOCAB + place for place, token in enumerate(SPECIAL)}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            "model_type": "qwen2_5_vl_text",
            "vocab_size": 672,
            "hidden_size": _HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": _HIDDEN,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    model = LIBRARIES["transformers"].Qwen2_5_VLForConditionalGeneration(config).eval()
    randomise(model, seed, {r"\.[qk]_proj\.": 2.2, r"\.o_proj\.": 4.0})
    model.save_pretrained(directory / "text_encoder")


def _make_transformer(directory: Path, small: RopeSize, seed: int) -> None:
    network = LIBRARIES["diffusers"].QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=small.layers,
        attention_head_dim=small.head,
        num_attention_heads=small.heads,
        joint_attention_dim=_HIDDEN,
        axes_dims_rope=small.rope,
    )
    network.eval()
    gains = JOINT_GAINS if small.layers == SIZES["tiny"].layers else _DEEP_GAINS
    randomise(network, seed, {**gains, "^img_in": 0.5})
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "hidden_states": torch.randn(2, 16, 64, generator=generator),
        "encoder_hidden_states": torch.randn(2, 12, _HIDDEN, generator=generator),
        "timestep": torch.tensor([0.3, 0.9]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }
    scale_to(_PREDICTION_STD, network.proj_out, lambda: network(**inputs, return_dict=False)[0])
    network.save_pretrained(directory / "transformer")


def _make_vae(directory: Path, seed: int) -> None:
    vae = LIBRARIES["diffusers"].AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1)
    vae.eval()
    randomise(vae, seed)
    latents = torch.randn(2, vae.config.z_dim, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    latents = latents * torch.tensor(vae.config.latents_std).reshape(1, -1, 1, 1, 1)
    # outputs are clipped to [-1, 1]: start from a scale without clipping
    vae.decoder.conv_out.weight.data.mul_(1e-3)
    scale_to(_PIXEL_STD, vae.decoder.conv_out, lambda: vae.decode(latents, return_dict=False)[0])
    images = torch.rand(2, 3, 1, 32, 32, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    wanted = torch.tensor(vae.config.latents_std).reshape(1, -1, 1, 1, 1)
    # scale an image's latents to a standard deviation of 1 after normalisation, as the network expects
    scale_to(1.0, vae.quant_conv, lambda: vae.encode(images, return_dict=False)[0].mean / wanted)
    vae.save_pretrained(directory / "vae")


def _preset(pipeline: str) -> TinyPreset:
    def write(directory: Path, size: str, seed: int) -> None:
        make(directory, size, seed, pipeline)

    return TinyPreset(tuple(SIZES), write)


PRESETS = {
    "qwen-image": _preset("QwenImagePipeline"),
    "qwen-image-edit": _preset("QwenImageEditPipeline"),
    "qwen-image-edit-plus": _preset("QwenImageEditPlusPipeline"),
}
