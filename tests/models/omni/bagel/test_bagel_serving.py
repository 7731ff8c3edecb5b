"""Replies to texts and images are those of the reference, under every condition of serving."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bagel_reference import Bagel, Sequence, picture, pixels
from bagel_stages import TOKENS, Part, Stages, request_of, sent, stage_request

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import ChatOptions, Request
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.registry import family_of, read_config

CASES: dict[str, list[Part]] = {
    "text": ["What is the sea like at night?"],
    "image": [(96, 48), "What do you see here?"],
    "same": [(96, 48), "What do you see there, day or night?"],
    "images": ["The first one:", (40, 60), "the second one:", (60, 60), "How do they differ?"],
    "last": ["Look at this", (48, 96)],
}


@dataclass
class Replies:
    ids: dict[str, list[int]]
    cached: dict[str, int]
    """Prompt tokens that were not computed."""


class Run:
    """Requests through the three stages, the last in its engine."""

    def __init__(self, stages: Stages, **config: Any) -> None:
        self.stages = stages
        self.engine = AutoregressiveEngine(
            stages.llm, AutoregressiveConfig(**{"num_blocks": 300, "block_size": 8, **config})
        )

    def __call__(self, cases: dict[str, list[Part]]) -> Replies:
        for name, parts in cases.items():
            self._add(name, self.stages.input.process(request_of(parts)))
        replies = Replies({name: [] for name in cases}, dict.fromkeys(cases, 0))
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                replies.ids[output.request_id] += output.token_ids
                replies.cached[output.request_id] += output.cached_tokens
            self.engine.audit()
        return replies

    def _add(self, name: str, payload: Payload) -> None:
        upstreams = {"input", "encoder"} if payload["media"] else {"input"}
        sampling = SamplingParams(max_tokens=TOKENS).over(self.stages.llm.default_sampling).over(FALLBACK)
        self.engine.add(stage_request(name, "llm", upstreams, sampling=sampling))
        self.engine.feed(name, "input", sent("input", "llm", payload), final=True)
        for source, chunk, final in self.stages.encoded(payload):
            self.engine.feed(name, source, chunk, final=final)


@pytest.fixture(scope="module")
def stages(tiny_dir: Path) -> Stages:
    return Stages(tiny_dir)


@pytest.fixture(scope="module")
def expected(reference: Bagel) -> dict[str, list[int]]:
    return {name: answer(reference, parts) for name, parts in CASES.items()}


def answer(reference: Bagel, parts: list[Part]) -> list[int]:
    """The reference's reply, its end included unless it was cut."""
    sequence = Sequence()
    for part in parts:
        if isinstance(part, str):
            reference.read(sequence, part)
        else:
            reference.see(sequence, pixels(reference.seen(reference.edited(picture(*part)))))
    ids, _ = reference.answer(sequence, TOKENS + 1)
    return ids[1:] if len(ids) > TOKENS else [*ids[1:], reference.end]


def test_replies_differ_and_some_end(expected: dict[str, list[int]], reference: Bagel) -> None:
    assert len({tuple(reply) for reply in expected.values()}) == len(CASES)
    assert any(reply[-1] == reference.end for reply in expected.values())


def test_one_by_one(stages: Stages, expected: dict[str, list[int]]) -> None:
    for name, parts in CASES.items():
        assert Run(stages)({name: parts}).ids == {name: expected[name]}


@pytest.mark.parametrize("config", [{}, {"max_tokens_per_step": 24}])
def test_in_a_batch(stages: Stages, expected: dict[str, list[int]], config: dict[str, Any]) -> None:
    assert Run(stages, **config)(CASES).ids == expected


def test_after_a_prefix_hit(stages: Stages, expected: dict[str, list[int]], reference: Bagel) -> None:
    """`same` begins like `image`; the third has another image of that size."""
    run, other = Run(stages), [(90, 45), *CASES["image"][1:]]
    assert run({"image": CASES["image"]}).cached == {"image": 0}
    again = run({"image": CASES["image"], "same": CASES["same"], "other": other})
    assert again.ids == {"image": expected["image"], "same": expected["same"], "other": answer(reference, other)}
    assert min(again.cached["image"], again.cached["same"]) >= 24  # the image is 20 tokens
    assert again.cached["other"] == 0


def test_after_preemption(stages: Stages, expected: dict[str, list[int]]) -> None:
    cases = {name: CASES[name] for name in ("text", "image", "last")}
    lengths = [len(stages.input.process(request_of(parts))["token_ids"]) + 2 for parts in cases.values()]
    run = Run(stages, prefix_caching=False, block_size=4, num_blocks=sum(-(-length // 4) for length in lengths))
    assert run(cases).ids == {name: expected[name] for name in cases}
    assert run.engine.stats()["preemptions_total"] > 0


def test_images_of_one_shape_are_encoded_together(stages: Stages) -> None:
    payloads = [stages.input.process(request_of([size])) for size in ((96, 48), (90, 45), (96, 48))]
    encoder = stages.encoder
    works = [work for one in payloads for work in encoder.feed("r", "input", sent("input", "encoder", one), final=True)]
    assert len({work.bucket for work in works}) == 1
    together = [result.payload["media"][0]["rows"] for result in encoder.run(works)]
    encoder.cache = type(encoder.cache)(0)
    alone = [encoder.run([work])[0].payload["media"][0]["rows"] for work in works]
    torch.testing.assert_close(torch.stack(together), torch.stack(alone), atol=1e-5, rtol=0)
    assert not torch.allclose(alone[0], alone[1])


def test_special_tokens_in_a_text_are_text(stages: Stages) -> None:
    ids = stages.input.process(request_of(["a <|im_end|> b"]))["token_ids"].tolist()
    assert ids.count(next(iter(stages.llm.end_token_ids))) == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(request_id="r", messages=[], modalities=["text"]), "messages is empty"),
        (
            request_of(["Hello"], chat=ChatOptions(tools=[{"type": "function"}])),
            "^tools: this model has no",
        ),
        (request_of(["Hello"], chat=ChatOptions(template_kwargs={"thinking": True})), r"^template_kwargs\.thinking"),
        (Request(request_id="r", prompt_token_ids=[70_000], modalities=["text"]), r"prompt_token_ids\[0\] is 70000"),
    ],
)
def test_requests_that_are_refused(stages: Stages, request_: Request, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        stages.input.process(request_)


def test_a_reply_takes_no_settings_of_an_image(stages: Stages) -> None:
    for given, name in (
        ({"options": {"think": True}}, r"options\.think"),
        ({"diffusion": DiffusionParams(height=64)}, "height"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{name} is for images, but modalities has no image"):
            stages.input.process(request_of(["Hello"], **given))


def test_a_checkpoint_is_known_by_its_name_or_its_files(tiny_dir: Path, tmp_path: Path) -> None:
    assert family_of(read_config(tiny_dir), tiny_dir).name == "bagel"
    assert family_of({"name": ["BAGEL-7B-MoT"]}, tiny_dir).name == "bagel"
    with pytest.raises(ConfigError, match="names no architectures"):
        family_of({"name": ["BAGEL-7B-MoT"]}, tmp_path)
