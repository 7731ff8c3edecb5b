"""Texts and images by turns are those of the reference: alone, beside other requests, with small chunks, and in a new
attempt; and nothing is left of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from bagel_reference import STORY, Bagel, Told, told
from bagel_stages import CPU, Drawing, Stages, request_of, sent, stage_request

from segue.engines.contract import LoadContext, Payload, SameWorker, StageOutput
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.messages.units import TurnEnd
from segue.models.omni.bagel.stages import STAGE_MODELS
from segue.models.omni.bagel.vision import patches

AGAIN = pytest.mark.nightly
WITHIN = 2e-4
TEXTS = 12
"""Tokens of each text."""
CASES: dict[str, dict[str, Any]] = {
    "story": STORY,
    "seen": {**STORY, "image": [60, 90], "text": "Go on with it", "images": 1, "size": [64, 32], "seed": 8},
}


def request(name: str, case: dict[str, Any]) -> Request:
    height, width = case["size"]
    params = DiffusionParams(
        num_inference_steps=case["steps"], guidance_scale=case["guidance"]["text"], height=height, width=width
    )
    parts = [tuple(case["image"])] if "image" in case else []
    return request_of(
        [*parts, case["text"]],
        name,
        modalities=["text", "image"],
        options={"interleave": case["images"]},
        diffusion=params,
        seed=case["seed"],
    )


@dataclass
class Story:
    """A request whose visits follow from each other, as a worker and the orchestrator make them."""

    drawing: Drawing
    name: str
    request: Request
    images: int
    resume: list[int] = field(default_factory=list)
    turns: list[TurnEnd] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    """Units up to the end of each text."""
    latents: list[torch.Tensor] = field(default_factory=list)
    over: bool = False

    def begin(self) -> None:
        stages, reader = self.drawing.stages, self.drawing.reader
        payload = stages.input.process(self.request)
        sampling = SamplingParams(max_tokens=TEXTS).over(stages.llm.default_sampling).over(FALLBACK)
        encoders = {"encoder", "vae_encoder"} if payload["media"] else set()
        asked = stage_request(
            self.name, "llm", {"input", *encoders}, self.request, downstreams={"denoiser"}, sampling=sampling,
            resume=self.resume,
        )  # fmt: skip
        reader.add(replace(asked, returns=True, turns=self.turns))
        reader.feed(self.name, "input", sent("input", "llm", payload), final=True)
        for source, chunk, final in stages.encoded(payload):
            reader.feed(self.name, source, chunk, final=final)
        reader.go_on(self.name)

    def take(self, output: StageOutput) -> None:
        """An output of the reader."""
        assert output.error is None
        assert output.first_index == len(self.ids), "units follow each other"
        self.ids += output.token_ids
        self.over = output.finished
        if not output.turn_ended:
            return
        self.ended.append(len(self.ids))
        visit = len(self.ended) - 1
        if output.payload is None:
            assert visit == self.images
            self.drawing.reader.close(self.name)
            return
        name = f"{self.name}@{visit}"
        self.drawing.denoiser.add(replace(stage_request(name, "denoiser", {"llm"}, self.request), visit=visit))
        self.drawing.denoiser.feed(name, "llm", sent("llm", "denoiser", output.payload), final=True)

    def drawn(self, payload: Payload) -> None:
        """An output of the denoiser: it is decoded and read again."""
        stages, reader = self.drawing.stages, self.drawing.reader
        self.latents.append(payload["latents"])
        decoder, image = stages.decoder, None
        for work in decoder.feed(
            decoder.begin(stage_request("d", "decoder", set()))[0], "denoiser", payload, final=True
        ):
            [result] = decoder.run([work])
            image = sent("decoder", "drawn_encoder", result.payload)
        assert image is not None
        for name, first in (("drawn_encoder", stages.encoder), ("drawn_vae_encoder", stages.vae_encoder)):
            same = SameWorker(frozenset(), {name.removeprefix("drawn_"): first})
            directory = stages.directory
            model = STAGE_MODELS[name](LoadContext(directory, name, CPU, torch.float32, same_worker=same))
            for work in model.feed("r", "decoder", image, final=True):
                [result] = model.run([work])
                reader.feed(self.name, name, sent(name, "llm", result.payload), final=work.last)
        reader.go_on(self.name)


def run(drawing: Drawing, *stories: Story) -> None:
    """Step until all is done. Nothing is held then."""
    by_name = {story.name: story for story in stories}
    for story in stories:
        story.begin()
    while drawing.reader.has_work() or drawing.denoiser.has_work():
        for output in drawing.reader.step() if drawing.reader.has_work() else ():
            by_name[output.request_id].take(output)
        drawing.inner.audit()
        for output in drawing.denoiser.step() if drawing.denoiser.has_work() else ():
            assert output.error is None
            if output.payload is not None:
                by_name[output.request_id.partition("@")[0]].drawn(output.payload)
        drawing.inner.audit()
    assert all(story.over for story in stories)
    assert drawing.inner.resources.pool.used == 0
    assert drawing.reader.stats()["contexts_lent"] == 0


@pytest.fixture(scope="module")
def stages(tiny_dir: Any) -> Stages:
    return Stages(tiny_dir, draws=True)


@pytest.fixture(scope="module")
def expected(reference: Bagel) -> dict[str, Told]:
    usual = {"text": 4.0, "image": 1.5, "above": 0.4, "upto": 1.0, "renorm": "global", "least": 0.0}
    return {name: told(reference, {**case, "guidance": usual}, TEXTS + 1) for name, case in CASES.items()}


def story(drawing: Drawing, case: str, name: str = "", **more: Any) -> Story:
    return Story(drawing, name or case, request(name or case, CASES[case]), CASES[case]["images"], **more)


def assert_told(made: Story, expected: Told, end: int) -> None:
    left = list(made.ids)
    for text in expected.texts:
        own = text[1:] + ([end] if len(text) <= TEXTS else [])
        assert left[: len(own)] == own
        left = left[len(own) :]
    assert not left
    assert len(made.latents) == len(expected.drawn)
    for ours, drawn in zip(made.latents, expected.drawn, strict=True):
        assert float((patches(ours[0], 2) - drawn.latents).abs().max()) < WITHIN


@pytest.mark.parametrize("config", [{"max_tokens_per_step": 24}, pytest.param({"prefix_caching": False}, marks=AGAIN)])
def test_alone_and_together(
    stages: Stages, expected: dict[str, Told], reference: Bagel, config: dict[str, Any]
) -> None:
    drawing = Drawing(stages, **config)
    alone = story(drawing, "story")
    run(drawing, alone)
    assert_told(alone, expected["story"], reference.end)
    both = [story(drawing, "story", "again"), story(drawing, "seen")]
    run(drawing, *both)
    assert_told(both[0], expected["story"], reference.end)
    assert_told(both[1], expected["seen"], reference.end)


@pytest.mark.parametrize("known", [pytest.param(1, marks=AGAIN), pytest.param("first", marks=AGAIN), "second",
                                   pytest.param("all", marks=AGAIN)])  # fmt: skip
def test_a_new_attempt(stages: Stages, expected: dict[str, Told], reference: Bagel, known: int | str) -> None:
    """It takes the texts that the journal has, ended or not, and draws and reads the same images again."""
    drawing = Drawing(stages)
    before = story(drawing, "story", "before")
    run(drawing, before)
    units = {1: 1, "first": before.ended[0], "second": before.ended[0] + 1, "all": len(before.ids)}[known]
    turns = [TurnEnd(end, "stop") for end in before.ended if end <= units]
    again = story(drawing, "story", resume=before.ids[:units], turns=turns)
    run(drawing, again)
    assert again.ids == before.ids
    assert again.ended == before.ended
    assert_told(again, expected["story"], reference.end)


@pytest.mark.parametrize("steps", [0, 14, *(pytest.param(steps, marks=AGAIN) for steps in (6, 20, 30))])
def test_one_that_is_cancelled_leaves_nothing(stages: Stages, steps: int) -> None:
    drawing = Drawing(stages)
    left = story(drawing, "story")
    left.begin()
    for _ in range(steps):
        for output in drawing.reader.step() if drawing.reader.has_work() else ():
            left.take(output)
        for output in drawing.denoiser.step() if drawing.denoiser.has_work() else ():
            if output.payload is not None:
                left.drawn(output.payload)
    drawing.reader.cancel("story")
    for visit in range(3):
        drawing.denoiser.cancel(f"story@{visit}")
    while drawing.reader.has_work():
        assert not drawing.reader.step()
    assert drawing.inner.resources.pool.used == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"interleave": 0}}, r"^options\.interleave is 0; it must be a number of images, at least 1"),
        ({"options": {"interleave": True}}, r"^options\.interleave is True; it must be a number of images"),
        ({"options": {"interleave": 17}}, r"^options\.interleave is 17; at most 10"),
        ({"modalities": ["image"]}, r"^options\.interleave is given, but modalities has no text"),
        ({"options": {"interleave": 2, "think": False}}, r"^options\.think is false, but modalities has text"),
        ({"diffusion": DiffusionParams(num_images_per_prompt=2)}, r"^num_images_per_prompt is 2; it must be 1"),
        ({"modalities": ["text"]}, r"^options\.interleave is for images, but modalities has no image"),
    ],
)
def test_requests_that_are_refused(stages: Stages, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        stages.input.process(request_of(["A boat"], **{
            "modalities": ["text", "image"], "options": {"interleave": 2}, **change,
        }))  # fmt: skip
