"""The demo's drawing pipeline: its captions, the judge of its pictures, resuming, and the checkpoint in the library and
in Segue."""

from __future__ import annotations

import random
import shutil
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

EXAMPLE = Path(__file__).parents[4] / "examples" / "demo_model"


@pytest.fixture(scope="module", autouse=True)
def package(one_thread: None) -> Any:
    """Makes the example importable."""
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_judge_sees_what_was_painted(seed: int) -> None:
    """Captions are parsed; a painted scene is right for its words, and wrong with one thing changed."""
    from demo_model import captions, draw, scenes
    from demo_model.pixels import painted

    rng = random.Random(seed)
    caption = captions.random_caption(rng)
    assert captions.caption_of(f"{str(caption).capitalize()}.") == caption
    things = captions.things_for(caption, rng)
    assert draw.is_right(caption, painted(things, caption.ground, seed))
    first, rest = things[0], things[1:]
    assert not draw.is_right(caption, painted(rest, caption.ground, seed))
    edit = captions.Edit("", (), things)
    for changed in (
        replace(first, colour=rng.choice([one for one in scenes.COLOURS if one != first.colour])),
        replace(first, shape=rng.choice([one for one in scenes.SHAPES if one != first.shape])),
        scenes.resized(first, "small" if first.size == "big" else "big"),
    ):
        assert not draw.is_right(edit, painted((changed, *rest), None, seed))
    assert draw.is_right(edit, painted(things, None, seed))


@pytest.mark.parametrize("words", ["", "two red dogs", "a red circle over a star", "a red circle on the table"])
def test_other_words_are_no_captions(words: str) -> None:
    from demo_model.captions import caption_of

    with pytest.raises(ValueError, match="not in the captions' language"):
        caption_of(words)


@pytest.mark.nightly
def test_training_resumes_and_its_checkpoint_draws_through_segue(tmp_path: Path) -> None:
    """Two calls learn what one does; the library and Segue draw and edit alike with it."""
    from demo_model import draw
    from demo_model.captions import random_edit
    from demo_model.pixels import painted

    once, twice = tmp_path / "once", tmp_path / "twice"
    draw.create(once)
    shutil.copytree(once, twice)

    def trained(directory: Path, *pauses: int) -> Any:
        made = draw.networks(directory)
        made = draw.train(made, replace(draw.VAE_STAGE, size=1), directory, draw.Limits(steps=1), "cpu", workers=0)
        for pause in pauses:
            limits, flow = draw.Limits(steps=3, pause=pause), replace(draw.FLOW_STAGE, size=2)
            mean = draw.train(deepcopy(made), flow, directory, limits, "cpu", workers=0)
        return mean

    made, resumed, untrained = trained(once, 3), trained(twice, 2, 1), draw.networks(twice)
    for name in draw.PARTS:
        weights, again = made[name].state_dict(), resumed[name].state_dict()
        assert all(torch.equal(weights[key], again[key]) for key in weights)
        assert any(not torch.equal(weights[key], values) for key, values in untrained[name].state_dict().items())

    draw.measure(made, once, "cpu")
    draw.write(once, made)
    edit = random_edit(random.Random(0))
    size = {"height": 128, "width": 128, "num_inference_steps": 2, "max_sequence_length": 64}
    drawn = {"prompt": "two red circles above a blue square", **size, "seed": 1}
    edited = {"prompt": str(edit), "image": Image.fromarray(painted(edit.before, None, 0)), **size, "seed": 2}
    pipeline = pipeline_of(once, "Flux2KleinPipeline")
    for ours, asked in zip(Chain(once).run(drawn, edited), (drawn, edited), strict=True):
        assert apart(ours, expected(pipeline, asked)) < WITHIN
