"""Published configs of pipelines without weights: the parts that determine a denoiser's compute. For
`--load-format dummy`; encoders and tokenizers are omitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.models.shared.diffusion.tiny import write_index
from segue.models.shared.tiny.files import write_json
from segue.models.shared.tiny.made import filled


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The configs of one pipeline."""

    pipeline: str
    transformer: Mapping[str, Any]
    """Includes `_class_name`, like the other two."""
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    text_width: int
    """Width of the text encoder's output per token."""
    request: Mapping[str, Any]
    """Default request: height, width, frames of a video."""
    guidance: str
    """Name of the classifier-free guidance parameter."""
    settings: Mapping[str, Any]
    """Settings in `model_index.json`."""


_QWEN = {
    "_class_name": "QwenImageTransformer2DModel",
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "in_channels": 64,
    "joint_attention_dim": 3584,
    "num_attention_heads": 24,
    "num_layers": 60,
    "out_channels": 16,
    "patch_size": 2,
}
_QWEN_VAE = {"_class_name": "AutoencoderKLQwenImage", "temperal_downsample": [False, True, True]}
_QWEN_STEPS = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "use_dynamic_shifting": True,
}
_WAN = {
    "_class_name": "WanTransformer3DModel",
    "attention_head_dim": 128,
    "ffn_dim": 14336,
    "in_channels": 48,
    "num_attention_heads": 24,
    "num_layers": 30,
    "out_channels": 48,
    "text_dim": 4096,
}
_WAN_VAE = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 160,
    "decoder_base_dim": 256,
    "in_channels": 12,
    "is_residual": True,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "z_dim": 48,
}
_WAN_STEPS = {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True}

QWEN_IMAGE = Shape(
    pipeline="QwenImagePipeline",
    transformer=_QWEN,
    vae=_QWEN_VAE,
    scheduler=_QWEN_STEPS,
    text_width=3584,
    request={"height": 1024, "width": 1024},
    guidance="true_cfg_scale",
    settings={},
)
WAN_5B = Shape(
    pipeline="WanPipeline",
    transformer=_WAN,
    vae=_WAN_VAE,
    scheduler=_WAN_STEPS,
    text_width=4096,
    request={"height": 704, "width": 1280, "num_frames": 121},
    guidance="guidance_scale",
    settings={"boundary_ratio": None, "expand_timesteps": True},
)
_SMALL = {"num_attention_heads": 2, "num_layers": 2}
SHAPES: Mapping[str, Shape] = {
    "qwen-image": QWEN_IMAGE,
    "wan2.2-ti2v-5b": WAN_5B,
    "tiny-image": Shape(
        pipeline="QwenImagePipeline",
        transformer={**_QWEN, **_SMALL, "joint_attention_dim": 32},
        vae=_QWEN_VAE,
        scheduler=_QWEN_STEPS,
        text_width=32,
        request={"height": 64, "width": 64},
        guidance="true_cfg_scale",
        settings={},
    ),
    "tiny-video": Shape(
        pipeline="WanPipeline",
        transformer={**_WAN, **_SMALL, "ffn_dim": 64, "text_dim": 32},
        vae=_WAN_VAE,
        scheduler=_WAN_STEPS,
        text_width=32,
        request={"height": 64, "width": 64, "num_frames": 9},
        guidance="guidance_scale",
        settings={"boundary_ratio": None, "expand_timesteps": True},
    ),
}


def write_shape(directory: Path, name: str) -> Path:
    """Write the configs of one of `SHAPES` to a new directory under `directory`."""
    target, shape = directory / f"shape-{name}", SHAPES[name]
    parts = {"scheduler": shape.scheduler, "transformer": shape.transformer, "vae": shape.vae}
    index = {part: ("diffusers", config["_class_name"]) for part, config in parts.items()}
    if shape.pipeline.startswith("Wan"):
        index["text_encoder"] = ("transformers", "UMT5EncoderModel")
    with filled(target) as made:
        write_index(made, shape.pipeline, index, **shape.settings)
        for part, config in parts.items():
            (made / part).mkdir()
            write_json(made / part, "scheduler_config.json" if part == "scheduler" else "config.json", dict(config))
    return target
