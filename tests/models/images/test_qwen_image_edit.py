"""Qwen-Image's editing: the same images as diffusers' pipelines for one image and for several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of
from hypothesis import given, strategies
from image_parity import one_weight_more
from PIL import Image

from segue.messages.errors import InvalidRequest
from segue.models.images.qwen_image import edit_input, tiny

ONE, SEVERAL = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
SHRINK = 64
"""Images of so many times fewer pixels than published, in both programs, so that this takes seconds."""


def make_image(seed: int, height: int, width: int) -> Image.Image:
    rough = np.random.default_rng(seed).integers(0, 255, (height // 10, width // 10, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((width, height))


WIDE, TALL = make_image(0, 60, 90), make_image(1, 80, 50)
GUIDED = {
    "prompt": "make it red",
    "negative_prompt": "grey, and without any colour",
    "true_cfg_scale": 3.0,
    "height": 64,
    "width": 96,
    "num_inference_steps": 4,
    "seed": 3,
}
PLAIN = {"prompt": "a red bicycle", "height": 64, "width": 96, "num_inference_steps": 3, "seed": 4}
TWICE = {**GUIDED, "prompt": "seven brothers", "num_images_per_prompt": 2, "num_inference_steps": 2, "seed": 6}
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    ONE: (
        {**GUIDED, "image": WIDE},
        {**PLAIN, "image": WIDE},
        {**PLAIN, "image": TALL, "height": None, "width": None},
        {**TWICE, "image": make_image(2, 60, 90)},
    ),
    SEVERAL: (
        {**GUIDED, "image": [WIDE, TALL]},
        {**PLAIN, "image": [make_image(2, 60, 90), TALL]},
        {**PLAIN, "image": [TALL], "height": None, "width": None},
        {**TWICE, "image": [WIDE, TALL]},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _smaller() -> Iterator[None]:
    whole = pipeline_qwenimage_edit.calculate_dimensions
    whole_plus = pipeline_qwenimage_edit_plus.calculate_dimensions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: whole(area // SHRINK, ratio))
        patch.setattr(
            pipeline_qwenimage_edit_plus, "calculate_dimensions", lambda area, ratio: whole_plus(area // SHRINK, ratio)
        )
        patch.setattr(edit_input, "AREA", edit_input.AREA // SHRINK)
        patch.setattr(edit_input, "SEEN_AREA", edit_input.SEEN_AREA // SHRINK)
        yield


@pytest.fixture(scope="module", params=[ONE, SEVERAL])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(kind)
    tiny.make(made, pipeline=kind)
    return made


@pytest.fixture(scope="module")
def chain(directory: Path) -> Chain:
    return Chain(directory)


@pytest.fixture(scope="module")
def theirs(kind: str, directory: Path) -> list[list[torch.Tensor]]:
    pipeline = pipeline_of(directory, kind)
    return [expected(pipeline, case) for case in CASES[kind]]


def test_alone(kind: str, chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    for case, images in zip(CASES[kind], theirs, strict=True):
        [made] = chain.run(case)
        assert apart(made, images) < WITHIN


@pytest.mark.parametrize("late", [pytest.param({}, marks=pytest.mark.nightly), {1: 1, 3: 2}])
def test_in_a_batch(kind: str, chain: Chain, theirs: list[list[torch.Tensor]], late: dict[int, int]) -> None:
    made = chain.run(*CASES[kind], late=late)
    assert max(apart(one, images) for one, images in zip(made, theirs, strict=True)) < WITHIN
    assert max(chain.batches) > 2, "some share a call"


def test_parity_fails_when_the_request_is_another(kind: str, chain: Chain, theirs: list[list[torch.Tensor]]) -> None:
    first = CASES[kind][0]
    other = {ONE: make_image(9, 60, 90), SEVERAL: [TALL, WIDE]}[kind]
    for changed in ({"prompt": "make it green"}, {"image": other}, {"seed": 8}, {"negative_prompt": "green"}):
        [made] = chain.run({**first, **changed})
        assert apart(made, theirs[0]) > 5 * WITHIN, changed


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("text_encoder", "_network.visual.blocks.0.mlp.down_proj"),
        ("vae_encoder", "_vae.encoder.mid_block.resnets.0.conv1"),
    ],
)
def test_parity_fails_when_one_weight_is_another(
    kind: str, directory: Path, theirs: list[list[torch.Tensor]], stage: str, name: str
) -> None:
    chain = Chain(directory)
    root, _, path = name.partition(".")
    layer = getattr(chain.adapters[stage], root).get_submodule(path)
    with one_weight_more(layer), one_weight_more(layer):
        [made] = chain.run(CASES[kind][0])
    assert apart(made, theirs[0]) > WITHIN


def test_refused(kind: str, chain: Chain) -> None:
    first = CASES[kind][0]
    for wrong, field, says in (
        ({"image": None}, "image", "needs 1"),
        ({"image": [WIDE] * 9}, "image", "at most"),
        ({"image": Image.new("RGB", (4000, 10))}, "image", "too short"),
        ({"prompt": "a <|image_pad|>"}, "prompt", "placeholder"),
        ({"height": 100}, "height", "96 or 112"),
        ({"max_sequence_length": 100}, "max_sequence_length", "takes no"),
    ):
        with pytest.raises(InvalidRequest, match=says) as caught:
            chain.run({**first, **wrong})
        assert field in str(caught.value.field)


@pytest.mark.parametrize("size", [(1, 500), (5000, 10)])
def test_a_strip_is_refused_before_the_processor_would(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="200 times") as caught:
        edit_input.seen_sides(Image.new("L", size), 384 * 384)
    assert caught.value.field == "image"
    assert edit_input.sides(Image.new("L", size), 384 * 384), "large enough to be seen"


@given(strategies.integers(16, 4000), strategies.integers(16, 4000))
def test_sides_are_the_pipelines(height: int, width: int) -> None:
    """At the published size: the function is asked for so many times more as it is shrunk by here."""
    area = 1024 * 1024
    across, down = pipeline_qwenimage_edit_plus.calculate_dimensions(area * SHRINK, width / height)
    blank = Image.new("L", (width, height))
    if min(across, down) < 32:
        with pytest.raises(InvalidRequest):
            edit_input.sides(blank, area)
    else:
        assert edit_input.sides(blank, area) == (down, across)
