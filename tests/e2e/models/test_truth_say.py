"""An omni model says a given text: so does transformers' talker where the thinker is made to write that text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from truth_system import WITHIN, System, Truth, apart, assert_same

from segue.messages.deltas import AudioDelta, Delta
from segue.messages.errors import InvalidRequest
from segue.messages.request import Message, TextPart
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen2_5_omni.input import _SYSTEM
from segue.models.omni.qwen2_5_omni.reference import Reply
from segue.models.shared.omni.say import asking
from segue.models.shared.reference import processors
from segue.orchestrator.omni.outputs import RequestOutput

DEPLOYMENT = {"stages": {name: {"max_tokens_per_step": 16} for name in ("thinker", "talker")}}
"""The text itself is computed in several steps."""
TEXT = "The sea is calm today; the <|im_end|> hills behind it are green, and no one is there to see them."
CODES = 120
PHOTO = Path(__file__).parents[3] / "assets" / "photo.jpg"


def prompt(text: str = TEXT, **changes: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "modalities": ["audio"],
        "voice": "Ethan",
        "seed": 5,
        "sampling": {"talker": SamplingParams(temperature=0.0, max_tokens=CODES)},
        "options": {"say": True},
        **changes,
    }


class _Made:
    """A `LogitsProcessor` that makes the thinker write `ids` after a prompt of `length` tokens."""

    def __init__(self, length: int, ids: list[int]) -> None:
        self._length, self._ids = length, ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        led = torch.full_like(scores, -torch.inf)
        led[:, self._ids[input_ids.shape[1] - self._length]] = 0.0
        return led


@pytest.fixture(scope="module")
def said(truth: Truth) -> Reply:
    """What transformers says."""
    library = truth.reference
    conversation = asking([Message("user", [TextPart(TEXT)])], TEXT, _SYSTEM)
    written = [
        {"role": one.role, "content": [{"type": "text", "text": part.text} for part in one.content]}
        for one in conversation
    ]
    inputs = library.process(library.prompt(written))
    tokenizer = library.processor.tokenizer
    ids = [*tokenizer(TEXT, split_special_tokens=True)["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>")]
    made = _Made(inputs["input_ids"].shape[1], ids)
    reply = library.generate(
        inputs,
        max_tokens=len(ids),
        max_codes=CODES,
        speaker="Ethan",
        noise_seed=5,
        thinker_logits_processor=processors(made),
    )
    assert reply.token_ids == ids
    return reply


def check(output: RequestOutput, said: Reply) -> None:
    assert output.token_ids["thinker"] == said.token_ids
    assert output.token_ids["talker"][: len(said.codes)] == said.codes
    assert output.finish_reason == "stop"
    assert output.audio is not None
    assert output.audio.samples.shape == said.samples.reshape(-1).shape
    assert apart(output.audio.samples, said.samples.detach().numpy().reshape(-1)) < WITHIN[1]


def test_the_speech_is_the_librarys(system: System, said: Reply) -> None:
    """Beside another text; a second time, from the cache; and not that of another text."""
    output, other = system.ask(prompt(), prompt(TEXT.replace("calm", "wild")))
    check(output, said)
    assert not output.text
    assert other.token_ids["talker"] != output.token_ids["talker"]
    [again] = system.ask(prompt(modalities=["text", "audio"]))
    check(again, said)
    assert again.usage.cached_tokens > 0
    assert again.text == TEXT


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_it_says_the_same_after_a_kill(system: System, said: Reply, stage: str) -> None:
    """The worker is stopped while the request arrives, and killed with it in its hands; then at the first sound."""

    async def before() -> None:
        worker = system.stopped(stage)
        task = asyncio.create_task(system.collect(prompt()))
        await system.admitted()
        worker.kill()
        output = await task
        check(output, said)
        assert output.metrics.attempts == 2

    system.run(system.replaced())
    system.run(before())

    def at_first(delta: Delta) -> None:
        nonlocal heard
        if isinstance(delta, AudioDelta) and not heard:
            heard = True
            system.kill(stage)

    heard = False
    system.run(system.replaced())
    output = system.run(system.collect(prompt(), at_first))
    check(output, said)


def test_a_long_text_is_said_to_its_end(system: System) -> None:
    """`max_tokens` of the thinker's deployment or of its library bounds replies that it writes, not this one."""
    text = "one two three four five six seven eight nine ten " * 40
    [output] = system.ask(prompt(text, sampling={"talker": SamplingParams(temperature=0.0, max_tokens=4)}))
    assert len(output.token_ids["thinker"]) > 400
    assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"options": {"say": "yes"}}, "options.say"),
        ({"messages": [{"role": "assistant", "content": "hm"}]}, "last of the messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": PHOTO}, "hm"]}]}, "no media"),
        ({"sampling": {"thinker": SamplingParams(max_tokens=5)}}, "sampling.thinker has max_tokens"),
    ],
)
def test_what_cannot_be_said(system: System, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        system.ask(prompt(**changes))


def test_a_text_that_does_not_fit(system: System) -> None:
    with pytest.raises(InvalidRequest, match="together they may have at most"):
        system.ask(prompt("Sea. " * 6000))


@pytest.mark.nightly
def test_it_is_the_same_without_cuts(plain_system: System, system: System) -> None:
    assert_same(*plain_system.ask(prompt()), *system.ask(prompt()))
