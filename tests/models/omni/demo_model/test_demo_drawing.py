"""The demo's drawing pipeline: its captions, the judge of its pictures, resuming, and the checkpoint in the library and
in Segue."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sys
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
    """Captions are parsed; what is laid out for one follows it; a painted scene is right for its words, and wrong with
    one thing changed."""
    from demo_model import pixels
    from demo_model.data import captions
    from demo_model.data.scenes import COLOURS, SHAPES, Scene, picture

    rng = random.Random(seed)
    caption = captions.random_caption(rng)
    assert captions.caption_of(f"{str(caption).capitalize()}.") == caption
    things = captions.things_for(caption, rng)
    assert caption.is_shown(things)
    ground = caption.ground or rng.choice([None, "dark", "pale"])
    assert pixels.is_right(caption, picture(Scene(things, seed, ground=ground)))
    first, rest = things[0], things[1:]
    assert not pixels.is_right(caption, picture(Scene(rest, seed, ground=ground)))
    edit = captions.Edit("", (), things)
    for changed in (
        replace(first, colour=rng.choice([one for one in COLOURS if one != first.colour])),
        replace(first, shape=rng.choice([one for one in SHAPES if one != first.shape])),
        replace(first, size="small" if first.size == "big" else "big"),
    ):
        assert not pixels.is_right(edit, picture(Scene((changed, *rest), seed)))
    assert pixels.is_right(edit, picture(Scene(things, seed)))


@pytest.mark.parametrize("words", ["", "two red dogs", "a red circle over a star", "a red circle on the table"])
def test_other_words_are_no_captions(words: str) -> None:
    from demo_model.data.captions import caption_of

    with pytest.raises(ValueError, match="not in the captions' language"):
        caption_of(words)


def test_a_further_call_goes_on_with_the_part_that_has_begun(tmp_path: Path) -> None:
    from demo_model.draw import SHARES, parts_left
    from demo_model.training.steps import LOG

    assert parts_left(tmp_path) == [*SHARES]
    rows = [{"part": "vae", "step": 40}, {"part": "words", "step": 20}, {"part": "vae", "step": 60}]
    (tmp_path / LOG).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert parts_left(tmp_path) == ["words", "flow", "decoder"]
    assert parts_left(EXAMPLE.parent / "segue-draws" / "training") == ["decoder"]


@pytest.mark.nightly
def test_training_resumes_and_its_checkpoint_draws_through_segue(tmp_path: Path) -> None:
    """Two calls learn what one does; the library and Segue draw and edit alike with it."""
    from demo_model.data.captions import drawing, random_edit
    from demo_model.data.scenes import picture
    from demo_model.training import draw
    from demo_model.training.steps import Limits, train

    def trained(directory: Path, *calls: int) -> Any:
        """`calls`: the step to which each call trains; the rates are those of a training of three steps."""
        (directory / "training").mkdir()
        for last in calls:
            made = draw.networks(directory)
            for whole, steps in (
                (draw.vae_part(made, directory, size=1), 1),
                (draw.reading_part(made, directory, size=3), 1),
                (draw.flow_part(made, directory, size=2), 3),
                (draw.decoder_part(made, directory, size=1), 1),
            ):

                def loss(batch: Any, step: int, whole: Any = whole, last: int = last) -> Any:
                    if step == last:
                        raise KeyboardInterrupt
                    return whole.loss(batch, step)

                with contextlib.suppress(KeyboardInterrupt):
                    device = torch.device("cpu")
                    train(
                        replace(whole, loss=loss), Limits(steps), directory / "training", device=device, saved_every=0
                    )
        return made

    once, twice = tmp_path / "once", tmp_path / "twice"
    draw.create(once)
    shutil.copytree(once, twice)
    made, resumed, untrained = trained(once, 3), trained(twice, 2, 3), draw.networks(twice)
    for name in draw.PARTS:
        weights, again = made[name].state_dict(), resumed[name].state_dict()
        assert all(torch.equal(weights[key], again[key]) for key in weights)
        assert any(not torch.equal(weights[key], values) for key, values in untrained[name].state_dict().items())

    draw.measure(made, once)
    draw.write(once, made)
    edit = random_edit(random.Random(0))
    size = {"height": 128, "width": 128, "num_inference_steps": 2, "max_sequence_length": 64}
    drawn = {"prompt": "two red circles above a blue square", **size, "seed": 1}
    given = Image.fromarray(picture(drawing(edit.before, 0, edit.ground)))
    edited = {"prompt": str(edit), "image": given, **size, "seed": 2}
    pipeline = pipeline_of(once, "Flux2KleinPipeline")
    for ours, asked in zip(Chain(once).run(drawn, edited), (drawn, edited), strict=True):
        assert apart(ours, expected(pipeline, asked)) < WITHIN
