"""The published shapes of Wan, without memory: what the stages hand to each other fits, all the way through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from image_parity import published

from segue.engines.contract import StageRequest
from segue.engines.diffusion.contract import DenoiserContext, Row
from segue.messages.diffusion import DiffusionParams
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.images.wan.decoder import WanDecoder
from segue.models.images.wan.denoiser import WanDenoiser
from segue.models.images.wan.graph import graph
from segue.models.images.wan.image_encoders import VaeEncoder
from segue.models.images.wan.tiny import PARTS
from segue.models.shared.diffusion.denoiser.given import Given
from segue.models.shared.diffusion.loading import build, component_class
from segue.models.shared.diffusion.tiny import write_index

META = torch.device("meta")
WAN_14B = published("Wan2.2-T2V-A14B-Diffusers", "transformer")
"""Of Wan2.1-T2V-14B, too."""
I2V_14B = published("Wan2.2-I2V-A14B-Diffusers", "transformer")
LOOKS = {**I2V_14B, "image_dim": 1280, "added_kv_proj_dim": 5120}
"""Of Wan2.1-I2V-14B."""
UMT5_XXL = {"model_type": "umt5", "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "num_layers": 24}
CLIP_H = {"model_type": "clip_vision_model", "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16}
TI2V_5B = published("Wan2.2-TI2V-5B-Diffusers", "transformer")
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "Wan2.1-T2V-1.3B": {"network": published("Wan2.1-T2V-1.3B-Diffusers", "transformer"), "billions": 1.42},
    "Wan2.1-T2V-14B": {"network": WAN_14B, "billions": 14.29},
    "Wan2.1-I2V-14B-720P": {"network": LOOKS, "billions": 16.40, "looks": True, "sees": True},
    "Wan2.2-T2V-A14B": {"network": WAN_14B, "billions": 14.29, "boundary": 0.875},
    "Wan2.2-I2V-A14B": {"network": I2V_14B, "billions": 14.29, "boundary": 0.9, "sees": True},
    "Wan2.2-TI2V-5B": {"network": TI2V_5B, "billions": 5.0, "per_token": True},
}
PARAMS = DiffusionParams(
    height=704, width=1280, num_frames=121, num_inference_steps=4, guidance_scale=5.0, max_sequence_length=512, fps=24.0
)


def write(directory: Path, said: dict[str, Any]) -> None:
    """The configs of a checkpoint, and nothing else of it."""
    parts: dict[str, Any] = dict(PARTS)
    if "boundary" in said:
        parts["transformer_2"] = PARTS["transformer"]
    if said.get("looks"):
        parts["image_encoder"] = ("transformers", "CLIPVisionModel")
        parts["image_processor"] = ("transformers", "CLIPImageProcessor")
    kind = "WanImageToVideoPipeline" if said.get("sees") else "WanPipeline"
    settings = {"boundary_ratio": said.get("boundary"), "expand_timesteps": bool(said.get("per_token"))}
    write_index(directory, kind, parts, **settings)
    like = "Wan2.2-TI2V-5B-Diffusers" if said.get("per_token") else "Wan2.2-T2V-A14B-Diffusers"
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "transformer": ("config.json", said["network"]),
        "vae": ("config.json", published(like, "vae")),
        "text_encoder": ("config.json", {**UMT5_XXL, "feed_forward_proj": "gated-gelu", "vocab_size": 256384}),
        "image_encoder": ("config.json", {**CLIP_H, "intermediate_size": 5120, "patch_size": 14, "image_size": 224}),
        "scheduler": ("scheduler_config.json", published(like, "scheduler")),
    }
    configs["transformer_2"] = configs["transformer"]
    for name, (file, config) in configs.items():
        (directory / name).mkdir()
        (directory / name / file).write_text(json.dumps(config))


def given(texts: torch.Tensor, images: torch.Tensor | None, looks: torch.Tensor | None) -> Given:
    request = StageRequest(
        request_id="one",
        stage="denoiser",
        request=Request(request_id="one", prompt=""),
        sampling=FALLBACK,
        seed=0,
        upstreams=frozenset(),
        downstreams=frozenset(),
        to_client=frozenset(),
    )
    made = Given(request, params=PARAMS)
    made.inputs["text_encoder"] = [{"texts": [{"embeds": texts}, {"embeds": texts[:1]}]}]
    if images is not None:
        made.inputs["vae_encoder"] = [{"images": [{"latents": images}]}]
    if looks is not None:
        made.inputs["image_encoder"] = [{"looks": [{"embeds": looks}]}]
    return made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "5B" in name else pytest.mark.nightly) for name in CHECKPOINTS]
)
def test_published_shapes(tmp_path: Path, name: str) -> None:
    said = CHECKPOINTS[name]
    write(tmp_path, said)
    ctx = DenoiserContext(tmp_path, "denoiser", META, torch.bfloat16, load_format="dummy")
    stages = set(graph(json.loads((tmp_path / "model_index.json").read_text())).stages)
    per_token = bool(said.get("per_token"))
    channels, scale = (48, 16) if per_token else (16, 8)
    sides = (31, 704 // scale, 1280 // scale)
    images = looks = None
    if "vae_encoder" in stages:
        item = {"first": torch.zeros(704, 1280, 3, dtype=torch.uint8), "last": None, "frames": 1 if per_token else 121}
        [encoded] = VaeEncoder(ctx).encode([item])
        images = encoded["latents"]
        assert images.shape == ((48, 1, *sides[1:]) if per_token else (20, *sides))
    assert ("image_encoder" in stages) == bool(said.get("looks"))
    with META:
        text = build(component_class(tmp_path, "text_encoder"), tmp_path / "text_encoder").bfloat16()
        texts = text(input_ids=torch.zeros(1, 40, dtype=torch.long)).last_hidden_state[0]
        if said.get("looks"):
            clip = build(component_class(tmp_path, "image_encoder"), tmp_path / "image_encoder")
            looks = clip(pixel_values=torch.zeros(1, 3, 224, 224), output_hidden_states=True).hidden_states[-2]
            assert looks.shape == (1, 257, 1280)

    denoiser = WanDenoiser(ctx)
    assert sum(weight.numel() for weight in denoiser.network.parameters()) / 1e9 == pytest.approx(
        said["billions"], rel=0.01
    )
    assert (denoiser.second is not None) == ("boundary" in said)
    conditions = denoiser.conditions(given(texts, images, looks))
    assert [condition.text.shape for condition in conditions] == [(512, 4096), (512, 4096)]
    samples = [next(iter(denoiser._samples(given(texts, images, looks), conditions))) for _ in range(2)]
    assert samples[0].latents.shape == (1, channels, *sides)
    assert samples[0].tokens == 31 * sides[1] * sides[2] // 4
    with torch.inference_mode():
        rows = [Row(sample, branch) for sample in samples for branch in (0, 1)]
        predictions = denoiser.predict(rows)
    assert [prediction.shape for prediction in predictions] == [(1, channels, *sides)] * 4

    payload = {**denoiser.finish(samples[0]), "latents": torch.zeros_like(samples[0].latents)}
    decoder = WanDecoder(ctx)
    state, _ = decoder.begin(given(texts, None, None).request)
    pieces = [decoder.run([work])[0].payload for work in decoder.feed(state, "denoiser", payload, final=True)[:3]]
    assert [piece["video"].shape for piece in pieces if piece is not None] == [
        (1, 704, 1280, 3),
        (4, 704, 1280, 3),
        (4, 704, 1280, 3),
    ]
