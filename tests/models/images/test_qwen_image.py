"""Qwen-Image: the same images as diffusers' pipeline, alone, in a batch, joined late; and what its parts refuse."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of
from image_parity import published
from safetensors.torch import load_file, save_file

from segue.engines.diffusion.contract import DenoiserContext, Row
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, TooLarge
from segue.models.images.qwen_image import tiny
from segue.models.images.qwen_image.decoder import QwenImageDecoder
from segue.models.images.qwen_image.denoiser import QwenImageDenoiser

GUIDED = {
    "prompt": "a small boat left the harbour in the early morning",
    "negative_prompt": "grey, and without any colour",
    "true_cfg_scale": 3.0,
    "height": 64,
    "width": 96,
    "num_inference_steps": 5,
    "seed": 3,
}
PLAIN = {"prompt": "a red bicycle", "height": 64, "width": 96, "num_inference_steps": 3, "seed": 4}
TURNED = {"prompt": "a house", "height": 96, "width": 64, "num_inference_steps": 4, "seed": 5}
SEVERAL = {**GUIDED, "prompt": "seven brothers", "num_inference_steps": 4, "num_images_per_prompt": 2, "seed": 6}
CASES = (GUIDED, PLAIN, TURNED, SEVERAL)


@pytest.fixture(scope="module")
def chain(qwen_image_dir: Path) -> Chain:
    return Chain(qwen_image_dir)


@pytest.fixture(scope="module")
def theirs(qwen_image_dir: Path) -> list[list[torch.Tensor]]:
    """By case."""
    pipeline = pipeline_of(qwen_image_dir, "QwenImagePipeline")
    return [expected(pipeline, case) for case in CASES]


def test_alone(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    for case, image in zip(CASES, theirs, strict=True):
        [made] = chain.run(case)
        assert apart(made, image) < WITHIN
        for index, pixels in enumerate(image):
            levels = abs(made.shown[index].astype(int) - (pixels.numpy() * 255).round().astype(int))
            assert levels.max() <= 1


def test_in_a_batch(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    made = chain.run(*CASES)
    assert max(apart(one, image) for one, image in zip(made, theirs, strict=True)) < WITHIN
    assert max(chain.batches) > 2, "some share a call"


def test_joined_late(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    made = chain.run(*CASES, late={1: 1, 2: 2, 3: 3})
    assert max(apart(one, image) for one, image in zip(made, theirs, strict=True)) < WITHIN
    assert max(chain.batches) > 2, "some share a call"


def test_images_show_what_was_asked_for(theirs: list[list[torch.Tensor]]) -> None:
    for image in theirs:
        assert all(0.15 < float(one.std()) < 0.4 for one in image), "not grey"
    first, second = theirs[3]
    assert float((first - second).abs().mean()) > 0.05


@pytest.mark.parametrize("changed", ["prompt", "negative_prompt", "seed", "true_cfg_scale"])
def test_parity_fails_when_the_request_is_another(chain: Chain, theirs: list[list[torch.Tensor]], changed: str) -> None:
    other: dict[str, Any] = {"prompt": "a small boot", "negative_prompt": "green", "seed": 8, "true_cfg_scale": 2.9}
    [made] = chain.run({**GUIDED, changed: other[changed]})
    assert apart(made, theirs[0]) > 5 * WITHIN


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        ("text_encoder", "layers.0.mlp.down_proj.weight"),
        *(("transformer", f"transformer_blocks.{block}.attn.to_v.weight") for block in range(3)),
        ("vae", "decoder.mid_block.resnets.0.conv1.weight"),
    ],
)
def test_parity_fails_when_one_weight_is_another(
    qwen_image_dir: Path, theirs: list[list[torch.Tensor]], tmp_path: Path, part: str, tensor: str
) -> None:
    copy = Path(shutil.copytree(qwen_image_dir, tmp_path / "copy"))
    [path] = (copy / part).glob("*.safetensors")
    tensors = load_file(path)
    [name] = [name for name in tensors if name.endswith(tensor) and "visual" not in name]
    tensors[name][0, 0] += 1.0
    save_file(tensors, path, {"format": "pt"})
    [made] = Chain(copy).run(GUIDED)
    assert apart(made, theirs[0]) > WITHIN


def test_guidance_in_a_part_of_the_steps(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    [whole] = chain.run({**GUIDED, "guidance_interval": (0.0, 1.0)})
    assert apart(whole, theirs[0]) < WITHIN
    assert chain.batches == [2, 2, 2, 2, 2]
    [part] = chain.run({**GUIDED, "guidance_interval": (0.2, 0.6)})
    assert chain.batches == [1, 2, 2, 1, 1]
    assert apart(part, theirs[0]) > WITHIN
    [never] = chain.run({**GUIDED, "guidance_interval": (0.0, 0.0)})
    unguided = {key: value for key, value in GUIDED.items() if key != "negative_prompt"}
    assert apart(never, chain.run(unguided)[0].pixels) < WITHIN


class ByLength(QwenImageDenoiser):
    padded_tokens = 1


class OneByOne(QwenImageDecoder):
    call_pixels = 1


def test_large_images_are_computed_by_text_length(
    chain: Chain, qwen_image_dir: Path, theirs: list[list[torch.Tensor]]
) -> None:
    ctx = DenoiserContext(qwen_image_dir, "denoiser", torch.device("cpu"), torch.float32)
    made = chain.through(ByLength(ctx)).run(*CASES)
    assert max(apart(one, image) for one, image in zip(made, theirs, strict=True)) < WITHIN


def test_random_weights_of_the_same_shape(qwen_image_dir: Path) -> None:
    [made] = Chain(qwen_image_dir, load_format="dummy").run(GUIDED)
    assert made.pixels[0].shape == (64, 96, 3)
    assert made.pixels[0].isfinite().all()


def test_large_outputs_in_tiles_and_one_by_one(chain: Chain, qwen_image_dir: Path) -> None:
    large = {**PLAIN, "height": 288, "width": 288, "num_inference_steps": 2, "num_images_per_prompt": 2}
    [whole] = chain.run(large)
    tiled = Chain(qwen_image_dir, options={"decoder": {"tile_pixels": 65536}})
    assert apart(tiled.run(PLAIN)[0], chain.run(PLAIN)[0].pixels) < 1e-4, "this one is small"
    [other] = tiled.run(large)
    for mine, yours in zip(other.pixels, whole.pixels, strict=True):
        assert mine.shape == yours.shape == (288, 288, 3)
        assert 0 < float((mine - yours).abs().mean()) < 0.1
    ctx = DenoiserContext(qwen_image_dir, "decoder", torch.device("cpu"), torch.float32)
    assert apart(chain.through(OneByOne(ctx), "decoder").run(large)[0], whole.pixels) < WITHIN


def test_the_published_shape(chain: Chain) -> None:
    """20 billion parameters, nothing computed."""
    adapters = {name: copy.copy(chain.adapters[name]) for name in ("denoiser", "decoder")}
    meta = torch.device("meta")
    with meta:
        network = QwenImageTransformer2DModel.from_config(published("Qwen-Image", "transformer"))
        adapters["denoiser"].network = network.to(torch.bfloat16)
        adapters["decoder"].vae = AutoencoderKLQwenImage.from_config(published("Qwen-Image", "vae"))
    assert sum(weight.numel() for weight in adapters["denoiser"].network.parameters()) > 20e9
    adapters["denoiser"].device, adapters["denoiser"].dtype = meta, torch.bfloat16
    params = DiffusionParams(height=928, width=1664, num_inference_steps=2)
    adapters["denoiser"].trial_params = lambda: [params]
    adapters["denoiser"].schedulers = copy.copy(chain.adapters["denoiser"].schedulers)
    [sample] = adapters["denoiser"].trials()
    assert sample.latents.shape == (1, 58 * 104, 64)
    short = [torch.empty(5, 3584, dtype=torch.bfloat16, device=meta)]
    other = dataclasses.replace(sample, conditions=short)
    for predicted in adapters["denoiser"].predict([Row(sample, 0), Row(other, 0)]):
        assert predicted.shape == sample.latents.shape
    finished = adapters["denoiser"].finish(sample)
    assert finished["latents"].shape == (1, 16, 1, 116, 208)
    adapters["decoder"].device = meta
    assert adapters["decoder"].vae.decode(finished["latents"].float()).sample.shape == (1, 3, 1, 928, 1664)


def test_progress_and_previews(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    [made] = chain.run({**SEVERAL, "partial_images": 2})
    assert apart(made, theirs[3]) < WITHIN
    assert sorted(made.progress) == [(index, step) for index in (0, 1) for step in (1, 2, 3, 4)]
    assert sorted(made.previews) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {image.shape for image in made.previews.values()} == {(32, 48, 3)}
    for (index, number), image in made.previews.items():
        small = made.shown[index].reshape(32, 2, 48, 2, 3).mean((1, 3))
        other = made.shown[1 - index].reshape(32, 2, 48, 2, 3).mean((1, 3))
        assert abs(image - small).mean() < abs(image - other).mean() or number == 0


@pytest.mark.parametrize(
    ("wrong", "field", "says"),
    [
        ({"height": 100}, "height", "96 or 112"),
        ({"width": 4096, "height": 4096}, "height", "2048 x 2048"),
        ({"width": 99_999, "height": 99_999}, "height", "at most 4194304 .*2048 x 2048"),
        ({"num_inference_steps": 201}, "num_inference_steps", "at most 200"),
        ({"num_images_per_prompt": 11}, "num_images_per_prompt", "at most 10"),
        ({"scheduler": "DDIMScheduler"}, "scheduler", "FlowMatchEulerDiscreteScheduler"),
        ({"guidance_scale": 3.0}, "guidance_scale", "takes no guidance_scale"),
        ({"num_frames": 5}, "num_frames", "takes no num_frames"),
        ({"max_sequence_length": 2000}, "max_sequence_length", "at most 1024"),
        ({"partial_images": 5}, "partial_images", "at most"),
        ({"num_inference_steps": 1}, "num_inference_steps", "at least 2"),
        ({"num_inference_steps": 0}, "num_inference_steps", "at least 1"),
        ({"height": "tall"}, "height", "int"),
        ({"true_cfg_scale": float("nan")}, "true_cfg_scale", "from 0 to 10000"),
    ],
)
def test_refused(chain: Chain, wrong: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        chain.run({**PLAIN, **wrong})
    assert field in str(caught.value.field)
    limits = ("at most 200", "2048 x 2048", "at most 4194304 .*2048 x 2048", "at most 10")
    assert isinstance(caught.value, TooLarge) == (says in limits)


def test_the_same_seed_makes_the_same_files(qwen_image_dir: Path, tmp_path: Path) -> None:
    tiny.make(tmp_path / "again")
    for path in sorted(qwen_image_dir.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(qwen_image_dir)).read_bytes(), path
