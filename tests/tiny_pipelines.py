"""Small pipelines of diffusers that no family names, of several kinds, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import diffusers
import torch
import transformers

from segue.models.images.flux2.tiny import SPECIAL as FLUX2_SPECIAL
from segue.models.images.flux2.tiny import make_mistral, make_vae
from segue.models.images.generic_pipeline.splits import SPLITS
from segue.models.shared.diffusion.tiny import (
    QWEN_SPECIAL,
    QWEN_TEMPLATE,
    make_clip,
    randomise,
    write_clip_tokenizer,
    write_index,
    write_qwen_tokenizer,
    write_tokenizer,
)
from segue.models.shared.tiny.files import train_tokenizer

SPECIAL = ("<pad>", "</s>")
_QWEN = {
    "vocab_size": 672,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
"""A language model that reads prompts."""


def stable_diffusion(directory: Path) -> None:
    """A UNet, CLIP, a scheduler that takes two calls a step at the start."""
    write_index(
        directory,
        "StableDiffusionPipeline",
        {
            "scheduler": ("diffusers", "PNDMScheduler"),
            "text_encoder": ("transformers", "CLIPTextModel"),
            "tokenizer": ("transformers", "CLIPTokenizer"),
            "unet": ("diffusers", "UNet2DConditionModel"),
            "vae": ("diffusers", "AutoencoderKL"),
        },
        safety_checker=[None, None],
        feature_extractor=[None, None],
        image_encoder=[None, None],
    )
    vocab = write_clip_tokenizer(directory / "tokenizer")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    make_clip(directory / "text_encoder", "CLIPTextModel", vocab, 0, **sizes)
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
        norm_num_groups=8,
        cross_attention_dim=32,
    )
    _write(unet, directory / "unet")
    _write(_image_vae(), directory / "vae")
    scheduler = diffusers.PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )
    scheduler.save_pretrained(directory / "scheduler")


def pixart_sigma(directory: Path) -> None:
    """A transformer that predicts its variance too, T5; it tells of steps by the old callback."""
    write_index(
        directory,
        "PixArtSigmaPipeline",
        {
            "scheduler": ("diffusers", "EulerAncestralDiscreteScheduler"),
            "text_encoder": ("transformers", "T5EncoderModel"),
            "tokenizer": ("transformers", "PreTrainedTokenizerFast"),
            "transformer": ("diffusers", "PixArtTransformer2DModel"),
            "vae": ("diffusers", "AutoencoderKL"),
        },
    )
    _t5(directory)
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        use_additional_conditions=False,
    )
    _write(transformer, directory / "transformer")
    _write(_image_vae(), directory / "vae")
    diffusers.EulerAncestralDiscreteScheduler().save_pretrained(directory / "scheduler")


def ltx(directory: Path, kind: str = "LTXConditionPipeline") -> None:
    """Video."""
    write_index(
        directory,
        kind,
        {
            "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
            "text_encoder": ("transformers", "T5EncoderModel"),
            "tokenizer": ("transformers", "PreTrainedTokenizerFast"),
            "transformer": ("diffusers", "LTXVideoTransformer3DModel"),
            "vae": ("diffusers", "AutoencoderKLLTXVideo"),
        },
    )
    _t5(directory)
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=1,
        caption_channels=32,
    )
    _write(transformer, directory / "transformer")
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    _write(vae, directory / "vae")
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(directory / "scheduler")


def ernie(directory: Path) -> None:
    """Mistral 3, a single-stream transformer, the VAE of Flux 2; no language model that rewrites prompts."""
    write_index(
        directory,
        "ErnieImagePipeline",
        {
            "pe": (None, None),
            "pe_tokenizer": (None, None),
            "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
            "text_encoder": ("transformers", "Mistral3Model"),
            "tokenizer": ("transformers", "PreTrainedTokenizerFast"),
            "transformer": ("diffusers", "ErnieImageTransformer2DModel"),
            "vae": ("diffusers", "AutoencoderKLFlux2"),
        },
    )
    more = {"pad_token": "<pad>", "bos_token": "<s>"}
    tokenizer = train_tokenizer(FLUX2_SPECIAL, begin="<s>")
    write_tokenizer(directory / "tokenizer", tokenizer, FLUX2_SPECIAL, "PreTrainedTokenizerFast", longest=512, **more)
    make_mistral(directory, "Mistral3Model", 1)
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=64,
        text_in_dim=32,
        rope_axes_dim=(4, 6, 6),
    )
    _write(transformer, directory / "transformer")
    make_vae(directory / "vae", 2)
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(directory / "scheduler")


def hunyuan(directory: Path) -> None:
    """Video, of two text encoders: a Qwen 2.5 VL's, and a T5 that reads bytes for what is quoted. Guidance is a part of
    the checkpoint."""
    write_index(
        directory,
        "HunyuanVideo15Pipeline",
        {
            "guider": ("diffusers", "ClassifierFreeGuidance"),
            "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
            "text_encoder": ("transformers", "Qwen2_5_VLTextModel"),
            "text_encoder_2": ("transformers", "T5EncoderModel"),
            "tokenizer": ("transformers", "Qwen2Tokenizer"),
            "tokenizer_2": ("transformers", "ByT5Tokenizer"),
            "transformer": ("diffusers", "HunyuanVideo15Transformer3DModel"),
            "vae": ("diffusers", "AutoencoderKLHunyuanVideo15"),
        },
    )
    write_qwen_tokenizer(directory / "tokenizer", QWEN_SPECIAL, chat_template=QWEN_TEMPLATE)
    config = transformers.AutoConfig.for_model("qwen2_5_vl_text", **_QWEN, num_hidden_layers=3)
    _write(transformers.Qwen2_5_VLTextModel(config), directory / "text_encoder")
    transformers.ByT5Tokenizer().save_pretrained(directory / "tokenizer_2")
    _write(transformers.T5EncoderModel(_t5_config(384)), directory / "text_encoder_2")
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,  # latents, those of an image and a mask
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        target_size=16,
        task_type="t2v",
    )
    _write(transformer, directory / "transformer")
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    _write(vae, directory / "vae")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0).save_pretrained(directory / "scheduler")
    diffusers.ClassifierFreeGuidance(guidance_scale=3.0).save_pretrained(directory / "guider")


def krea2(directory: Path) -> None:
    """Images, of many layers of a Qwen 3 VL; the VAE of Qwen-Image."""
    layers = SPLITS["Krea2Pipeline"].settings["text_encoder_select_layers"]
    write_index(
        directory,
        "Krea2Pipeline",
        {
            "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
            "text_encoder": ("transformers", "Qwen3VLModel"),
            "tokenizer": ("transformers", "Qwen2Tokenizer"),
            "transformer": ("diffusers", "Krea2Transformer2DModel"),
            "vae": ("diffusers", "AutoencoderKLQwenImage"),
        },
    )
    write_qwen_tokenizer(directory / "tokenizer", QWEN_SPECIAL, chat_template=QWEN_TEMPLATE)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    text = {**_QWEN, "num_hidden_layers": max(layers) + 1, "head_dim": 16}
    config = transformers.AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision)
    _write(transformers.Qwen3VLModel(config), directory / "text_encoder")
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        timestep_embed_dim=16,
        text_hidden_dim=32,
        num_text_layers=len(layers),
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=48,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    _write(transformer, directory / "transformer")
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    _write(vae, directory / "vae")
    diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=6400
    ).save_pretrained(directory / "scheduler")


MAKERS: dict[str, Callable[[Path], None]] = {
    "StableDiffusionPipeline": stable_diffusion,
    "PixArtSigmaPipeline": pixart_sigma,
    "LTXConditionPipeline": ltx,
}
"""Those that are called whole."""

SPLIT_MAKERS: dict[str, Callable[[Path], None]] = {
    "LTXPipeline": partial(ltx, kind="LTXPipeline"),
    "ErnieImagePipeline": ernie,
    "HunyuanVideo15Pipeline": hunyuan,
    "Krea2Pipeline": krea2,
}
"""Those that modular blocks take apart."""


def _image_vae() -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        norm_num_groups=4,
        scaling_factor=0.18215,
    )


def _t5(directory: Path) -> None:
    tokenizer = train_tokenizer(SPECIAL, end="</s>")
    more = {"pad_token": "<pad>", "eos_token": "</s>"}
    write_tokenizer(directory / "tokenizer", tokenizer, SPECIAL, "PreTrainedTokenizerFast", longest=512, **more)
    _write(transformers.T5EncoderModel(_t5_config(672)), directory / "text_encoder")


def _t5_config(vocab: int) -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=vocab, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )


def _write(network: torch.nn.Module, directory: Path) -> None:
    randomise(network.eval(), 1)
    network.save_pretrained(directory)  # type: ignore[operator]
