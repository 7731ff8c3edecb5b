"""The demo's trained models, as they lie in the repository: a sample of what their cards state."""

from __future__ import annotations

import base64
import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segue import Omni
from segue.server.page.examples import read_examples
from segue.server.settings import ServerSettings

EXAMPLES = Path(__file__).parents[4] / "examples"
SHAPES, DRAWS = EXAMPLES / "segue-shapes", EXAMPLES / "segue-draws"
LEAST = {"picture": 0.85, "clip": 0.9, "nothing": 0.95, "valid JSON": 0.95}
"""Right answers in a sample of 20 questions each; the card's figures are of more."""
SPOKEN = 0.8
"""Of 60 spoken questions."""
MISTAKEN = 1.5
"""Words of 4 answers that a recogniser mistakes, relative to espeak-ng's own sound of them."""


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[None]:
    """Makes the example importable."""
    sys.path.insert(0, str(EXAMPLES / "demo_model"))
    yield
    sys.path.remove(str(EXAMPLES / "demo_model"))


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni(SHAPES, progress=False) as omni:
        yield omni


def test_written_and_spoken_questions_are_answered_right(omni: Omni) -> None:
    """Without espeak-ng written ones alone."""
    from demo_model.evaluate import held_out, shares

    speaks = importlib.util.find_spec("espeakng_loader") is not None
    asked = list(held_out(20, spoken=speaks, seed=1))
    outs = omni.generate([one.prompt for one in asked], modalities=["text"])
    found = shares(asked, [out.text for out in outs])
    assert all(found[sort] >= least for sort, least in LEAST.items()), found
    spoken = [share for sort, share in found.items() if sort.startswith("spoken")]
    assert len(spoken) == (3 if speaks else 0)
    assert not spoken or sum(spoken) / 3 >= SPOKEN, found


def test_what_was_painted_is_described(omni: Omni) -> None:
    """As drawings are judged by the half that sees."""
    from demo_model.judge import held_out, looked_at, painted

    wanted = [what for _, what in held_out(12)]
    pictures = painted(wanted)
    right = looked_at(omni, wanted, pictures)
    assert sum(right) >= 21, right
    assert not any(looked_at(omni, wanted[-6:-1], pictures[-5:]))


def test_what_it_says_is_understood(omni: Omni) -> None:
    """By a recogniser that knows nothing of the model, and understands not much more of espeak-ng itself."""
    pytest.importorskip("pocketsphinx")
    pytest.importorskip("espeakng_loader")
    from demo_model.evaluate import speech

    found = speech(omni, 4)
    assert found["words"] > 15
    assert found["error"] <= MISTAKEN * found["espeak"], found


def test_the_examples_are_answered(omni: Omni) -> None:
    """Those of the page and of `make demo`, spoken questions too, in words and aloud."""
    from demo_model.data.questions import facts_of

    examples = read_examples(omni.card, ServerSettings())
    assert len(examples) == 8
    prompts: list[Any] = [{"messages": one["messages"]} for one in examples]
    outs = omni.generate(prompts, modalities=["text", "audio"], voice="Chelsie", seed=1)
    right = [facts_of(out.text) == facts_of(one["answer"]) for out, one in zip(outs, examples, strict=True)]
    spoken = [any(part["type"] == "input_audio" for part in one["messages"][-1]["content"]) for one in examples]
    # where it was trained, four of five written ones and two of three spoken ones; others round otherwise
    assert sum(spoken) == 3
    assert sum(good and not aloud for good, aloud in zip(right, spoken, strict=True)) >= 3, [out.text for out in outs]
    assert sum(good and aloud for good, aloud in zip(right, spoken, strict=True)) >= 1, [out.text for out in outs]
    assert all(float(np.abs(out.audio.samples).max()) > 0.01 for out in outs)


def test_pictures_are_drawn_and_edited() -> None:
    """Some of those of the page and of `make demo`, edits too, judged by plain checks of their pixels."""
    from demo_model.pixels import follows

    with Omni(DRAWS, progress=False) as omni:
        examples = read_examples(omni.card, ServerSettings())
        assert len(examples) == 6
        examples = examples[1::2]
        prompts = []
        for one in examples:
            width, height = map(int, one["size"].split("x"))
            prompts.append({"prompt": one["prompt"], "seed": 7, "width": width, "height": height})
            prompts[-1]["num_inference_steps"] = one["steps"]
            if "image" in one:
                before = base64.b64decode(one["image"].partition(",")[2])
                prompts[-1]["image"] = Image.open(io.BytesIO(before))
        outs = omni.generate(prompts)
    right = [follows(one, np.asarray(out.images[0])) for one, out in zip(examples, outs, strict=True)]
    assert sum(right) >= 2, right  # all where it was trained
