"""Qwen-Image: the same pictures as diffusers' pipeline, alone, in a batch, joined late; and what its parts refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of

from segue.messages.errors import InvalidRequest, TooLarge
from segue.models.qwen_image import tiny

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
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen-image")
    tiny.make(made)
    return made


@pytest.fixture(scope="module")
def chain(directory: Path) -> Chain:
    return Chain(directory)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> list[list[torch.Tensor]]:
    """By case."""
    pipeline = pipeline_of(directory, "QwenImagePipeline")
    return [expected(pipeline, case) for case in CASES]


def test_alone(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    for case, picture in zip(CASES, theirs, strict=True):
        [made] = chain.run(case)
        assert apart(made, picture) < WITHIN
        for index, pixels in enumerate(picture):
            levels = abs(made.shown[index].astype(int) - (pixels.numpy() * 255).round().astype(int))
            assert levels.max() <= 1


def test_in_a_batch(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    made = chain.run(*CASES)
    assert max(apart(one, picture) for one, picture in zip(made, theirs, strict=True)) < WITHIN
    assert max(chain.batches) > 2, "some share a call"


def test_joined_late(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    made = chain.run(*CASES, late={1: 1, 2: 2, 3: 3})
    assert max(apart(one, picture) for one, picture in zip(made, theirs, strict=True)) < WITHIN
    assert max(chain.batches) > 2, "some share a call"


def test_pictures_show_what_was_asked_for(theirs: list[list[torch.Tensor]]) -> None:
    for picture in theirs:
        assert all(0.15 < float(one.std()) < 0.4 for one in picture), "not grey"
    first, second = theirs[3]
    assert float((first - second).abs().mean()) > 0.05


@pytest.mark.parametrize("changed", ["prompt", "negative_prompt", "seed", "true_cfg_scale"])
def test_parity_fails_when_the_request_is_another(chain: Chain, theirs: list[list[torch.Tensor]], changed: str) -> None:
    other: dict[str, Any] = {"prompt": "a small boot", "negative_prompt": "green", "seed": 8, "true_cfg_scale": 2.9}
    [made] = chain.run({**GUIDED, changed: other[changed]})
    assert apart(made, theirs[0]) > 5 * WITHIN


def test_parity_fails_when_one_weight_is_another(directory: Path, theirs: list[list[torch.Tensor]]) -> None:
    for stage, name in (
        ("text_encoder", "_network.language_model.layers.0.mlp.down_proj"),
        *(("denoiser", f"network.transformer_blocks.{block}.attn.to_v") for block in range(3)),
        ("decoder", "vae.decoder.mid_block.resnets.0.conv1"),
    ):
        chain = Chain(directory)
        root, _, path = name.partition(".")
        weight = getattr(chain.adapters[stage], root).get_submodule(path).weight
        with torch.no_grad():
            weight[0, 0] += 1.0
        [made] = chain.run(GUIDED)
        assert apart(made, theirs[0]) > WITHIN, name


def test_progress_and_previews(chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    [made] = chain.run({**SEVERAL, "partial_images": 2})
    assert apart(made, theirs[3]) < WITHIN
    assert sorted(made.progress) == [(index, step) for index in (0, 1) for step in (1, 2, 3, 4)]
    assert sorted(made.previews) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {picture.shape for picture in made.previews.values()} == {(32, 48, 3)}
    for (index, number), picture in made.previews.items():
        small = made.shown[index].reshape(32, 2, 48, 2, 3).mean((1, 3))
        other = made.shown[1 - index].reshape(32, 2, 48, 2, 3).mean((1, 3))
        assert abs(picture - small).mean() < abs(picture - other).mean() or number == 0


@pytest.mark.parametrize(
    ("wrong", "field", "says"),
    [
        ({"height": 100}, "height", "96 or 112"),
        ({"width": 4096, "height": 4096}, "height", "2048 x 2048"),
        ({"num_inference_steps": 201}, "num_inference_steps", "at most 200"),
        ({"num_images_per_prompt": 11}, "num_images_per_prompt", "at most 10"),
        ({"scheduler": "DDIMScheduler"}, "scheduler", "FlowMatchEulerDiscreteScheduler"),
        ({"guidance_scale": 3.0}, "guidance_scale", "takes no guidance_scale"),
        ({"num_frames": 5}, "num_frames", "takes no num_frames"),
        ({"max_sequence_length": 2000}, "max_sequence_length", "at most 1024"),
        ({"partial_images": 5}, "partial_images", "at most"),
        ({"num_inference_steps": 0}, "num_inference_steps", "at least 1"),
        ({"height": "tall"}, "height", "int"),
        ({"true_cfg_scale": float("nan")}, "true_cfg_scale", "finite"),
    ],
)
def test_refused(chain: Chain, wrong: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        chain.run({**PLAIN, **wrong})
    assert field in str(caught.value.field)
    assert isinstance(caught.value, TooLarge) == ("at most 200" in says or says in ("2048 x 2048", "at most 10"))


def test_the_same_seed_makes_the_same_files(directory: Path, tmp_path: Path) -> None:
    tiny.make(tmp_path / "again")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(directory)).read_bytes(), path
