"""Denoisers in their published shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusion_shapes import META, call, on_meta, parameters, samples, write_configs

from segue.messages.diffusion import DiffusionParams
from segue.models.images.qwen_image.denoiser import QwenImageDenoiser
from segue.models.images.sdxl.denoiser import SdxlDenoiser

pytestmark = pytest.mark.slow


def test_sdxl(tmp_path: Path) -> None:
    write_configs(
        tmp_path,
        {
            "_class_name": "StableDiffusionXLPipeline",
            "scheduler": ["diffusers", "DDIMScheduler"],
            "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
        {
            "scheduler": {
                "_class_name": "DDIMScheduler",  # Euler takes its noise levels back from the device, which has none
                "beta_end": 0.012,
                "beta_schedule": "scaled_linear",
                "beta_start": 0.00085,
                "steps_offset": 1,
                "timestep_spacing": "leading",
            },
            "vae": {"block_out_channels": [128, 256, 512, 512], "scaling_factor": 0.13025},
            "unet": {
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "attention_head_dim": [5, 10, 20],
                "block_out_channels": [320, 640, 1280],
                "cross_attention_dim": 2048,
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "projection_class_embeddings_input_dim": 2816,
                "sample_size": 128,
                "transformer_layers_per_block": [1, 2, 10],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                "use_linear_projection": True,
            },
        },
    )
    denoiser = on_meta(SdxlDenoiser, tmp_path)
    assert parameters(denoiser) == pytest.approx(2.567, abs=0.001)
    encoders = ("text_encoder", 768, 0), ("text_encoder_2", 1280, 1280)
    chosen = []
    for name, texts, scale in (("one", 1, 5.0), ("two", 2, 7.0), ("three", 1, 1.0)):
        inputs = {
            stage: {
                "texts": [{"embeds": torch.empty(77, width, device=META), "pooled": torch.empty(pooled, device=META)}]
                * texts
            }
            for stage, width, pooled in encoders
        }
        params = DiffusionParams(height=1024, width=1024, num_inference_steps=30, guidance_scale=scale)
        chosen += samples(denoiser, name, params, inputs)
    predictions = call(denoiser, chosen)
    assert [tuple(one.shape) for one in predictions] == [(1, 4, 128, 128)] * 5


@pytest.mark.nightly  # another of the same kind of denoiser, in its size
def test_qwen_image(tmp_path: Path) -> None:
    write_configs(
        tmp_path,
        {
            "_class_name": "QwenImagePipeline",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "transformer": ["diffusers", "QwenImageTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLQwenImage"],
        },
        {
            "scheduler": {
                "_class_name": "FlowMatchEulerDiscreteScheduler",
                "base_shift": 0.5,
                "max_image_seq_len": 8192,
                "max_shift": 0.9,
                "shift_terminal": 0.02,
                "use_dynamic_shifting": True,
            },
            "vae": {"temperal_downsample": [False, True, True]},
            "transformer": {
                "attention_head_dim": 128,
                "axes_dims_rope": [16, 56, 56],
                "in_channels": 64,
                "joint_attention_dim": 3584,
                "num_attention_heads": 24,
                "num_layers": 60,
                "out_channels": 16,
                "patch_size": 2,
            },
        },
    )
    denoiser = on_meta(QwenImageDenoiser, tmp_path)
    assert parameters(denoiser) == pytest.approx(20.43, abs=0.01)
    chosen = []
    for name, lengths in (("one", (20, 9)), ("two", (31,))):
        texts = {"texts": [{"embeds": torch.empty(length, 3584, device=META)} for length in lengths]}
        params = DiffusionParams(height=1328, width=1328, num_inference_steps=50, true_cfg_scale=4.0)
        chosen += samples(denoiser, name, params, {"text_encoder": texts})
    predictions = call(denoiser, chosen)
    assert [tuple(one.shape) for one in predictions] == [(1, 83 * 83, 64)] * 3
