"""What the tests of the generic multimodal family share: prompts of every kind, transformers' answers to them, and the
three stages driven as a worker would drive them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_engine import engine_over
from PIL import Image

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.media.parts import PYTHON_POLICY, messages_from
from segue.messages.request import Earlier, Message, Request
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.omni.multimodal_lm.encoder import Encoder
from segue.models.omni.multimodal_lm.input import InputProcessor
from segue.models.omni.multimodal_lm.llm import LLM
from segue.models.omni.multimodal_lm.stages import STAGE_MODELS, TRANSFERS
from segue.models.shared.library import AutoModelForMultimodalLM, AutoProcessor

FAMILIES = ("qwen2.5-vl", "qwen2-audio", "llava-onevision", "qwen3-vl", "gemma3-vision", "llama3.2-vision")
SEES = ("qwen2.5-vl", "llava-onevision", "qwen3-vl", "gemma3-vision", "llama3.2-vision")
TOKENS = 20
FPS = 2.0


# --- prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One user message: its media in order, (kind, seed) each, and the text behind them."""

    name: str
    text: str
    media: tuple[tuple[str, int], ...] = ()


TEXT = Case("text", "write a few words about the sea and the hills behind it")
SIGHTS = (
    TEXT,
    Case("picture", "what is this", (("image", 1),)),
    Case("images", "how do these differ", (("image", 2), ("image", 3), ("image", 4))),
    Case("clip", "what happens here", (("video", 5),)),
    Case("mixed", "is the image out of the clip?", (("image", 8), ("video", 9), ("image", 10))),
)
IMAGES = (*SIGHTS[:3], Case("two", "is it the same place?", (("image", 8), ("image", 10))))
CLIPS = Case("clips", "which is longer?", (("video", 6), ("video", 7)))
EQUAL_CLIPS = Case("clips", "which is longer?", (("video", 6), ("video", 8)))
"""LLaVA-OneVision's processor takes several clips in one prompt only where they have as many frames."""
SOUNDS = (
    TEXT,
    Case("recording", "what was said", (("audio", 1),)),
    Case("recordings", "who spoke first?", (("audio", 2), ("audio", 3))),
)


def cases_of(family: str) -> tuple[Case, ...]:
    if family == "qwen2-audio":
        return SOUNDS
    if family in ("gemma3-vision", "llama3.2-vision"):
        return IMAGES
    return (*SIGHTS, EQUAL_CLIPS if family == "llava-onevision" else CLIPS)


def medium(kind: str, seed: int) -> Any:
    """An image, clip or recording, its size by its seed; some are of equal size."""
    rng = np.random.default_rng(seed)
    if kind == "audio":
        t = np.arange(9_000 + 1_700 * (seed % 4)) / 16_000
        tones = sum(np.sin(2 * np.pi * f * t + p) for f, p in rng.uniform((100, 0), (3000, 6), (5, 2)))
        return (0.1 * tones + 0.01 * rng.standard_normal(len(t))).astype(np.float32)
    shape = (4 + seed % 3, 5, 3) if kind == "image" else (4 + 2 * (seed % 2), 3, 4, 3)
    blocks = rng.integers(0, 255, shape, dtype=np.uint8)
    return np.kron(blocks, np.ones((*(1,) * (len(shape) - 3), 28, 28, 1), dtype=np.uint8))


# --- the reference ---------------------------------------------------------------------------------------------------


@cache
def library_processor(directory: Path) -> Any:
    return AutoProcessor.from_pretrained(directory)


@cache
def library_model(directory: Path) -> Any:
    return AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32).eval()


def processed(directory: Path, case: Case, **asked: Any) -> dict[str, Any]:
    """What the library's `apply_chat_template` makes of a case. `asked`: what is asked of the processor besides."""
    content: list[dict[str, Any]] = []
    metadata = []
    for kind, seed in case.media:
        thing = medium(kind, seed)
        if kind == "video":
            count = len(thing)
            metadata.append({"total_num_frames": count, "fps": FPS, "frames_indices": list(range(count))})
            thing = thing.transpose(0, 3, 1, 2)
        content.append({"type": kind, kind: Image.fromarray(thing) if kind == "image" else thing})
    conversation = [{"role": "user", "content": [*content, {"type": "text", "text": case.text}]}]
    return dict(
        library_processor(directory).apply_chat_template(
            conversation,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={**asked, **({"video_metadata": [metadata]} if metadata else {})},
        )
    )


def answer(directory: Path, inputs: dict[str, Any], tokens: int = TOKENS) -> list[int]:
    """The library's own, greedy. Llama 4's processor makes bfloat16, whatever the model is."""
    given = {
        name: value.to(torch.float32) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with torch.inference_mode():
        out = library_model(directory).generate(**given, do_sample=False, max_new_tokens=tokens)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


# --- the stages ------------------------------------------------------------------------------------------------------


def context(directory: Path, stage: str, **more: Any) -> AutoregressiveContext:
    return AutoregressiveContext(directory, stage, torch.device("cpu"), torch.float32, **more)


def request_of(case: Case, name: str = "r") -> Request:
    content: list[dict[str, Any]] = []
    for kind, seed in case.media:
        thing = medium(kind, seed)
        given = {"image": thing, "audio": (thing, 16_000), "video": (thing, FPS)}[kind]
        content.append({"type": kind, kind: given})
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": case.text}]}]
    return Request(request_id=name, messages=messages_from(messages, PYTHON_POLICY))


def beside(stage: InputProcessor, case: Case) -> None:
    """Check that a prompt of text, of ids and of expanded ids, each with its media beside it, become the payload of the
    chat."""
    request = request_of(case)
    expected = stage.process(request)
    parts = sorted(request.media(), key=lambda part: part.kind)  # as clients give them: kind by kind
    media = [Message("user", [*parts])]
    text = stage._templated(request, stage._checked(request.messages))  # the text of a chat that a client renders
    prompts: tuple[dict[str, Any], ...] = (
        {"prompt": text},
        {"prompt_token_ids": stage._processor.plain(text)},
        {"prompt_token_ids": expected["token_ids"].tolist()},
    )
    for prompt in prompts:
        assert_equal(stage.process(Request(request_id="r", messages=media, **prompt)), expected)


def goes_on(stage: InputProcessor, case: Case) -> None:
    """Check that what a request reads that goes on from a chat is what all of its ids, with the media, become."""
    first = request_of(case)
    begun = stage.process(first)["token_ids"].tolist()
    made = stage.process(Request(request_id="r", prompt_token_ids=[3, 4, 5], earlier=[Earlier(first, [6, 7])]))
    ids = made["token_ids"].tolist()
    assert ids == [*begun, 6, 7, 3, 4, 5]
    parts = sorted(first.media(), key=lambda part: part.kind)
    media = [Message("user", [*parts])] if parts else []
    assert_equal(stage.process(Request(request_id="r", prompt_token_ids=ids, messages=media)), made)


def assert_equal(made: Any, expected: Any) -> None:
    """Compare payloads."""
    if isinstance(expected, dict):
        assert made.keys() == expected.keys()
        for key in expected:
            assert_equal(made[key], expected[key])
    elif isinstance(expected, list):
        assert len(made) == len(expected)
        for one, other in zip(made, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(made, expected)
    else:
        assert made == expected


class Stages:
    """The adapters of one checkpoint."""

    def __init__(self, directory: Path, **llm: Any) -> None:
        """`llm`: fields of the language model's context."""
        self.input: InputProcessor = STAGE_MODELS["input"](context(directory, "input"))
        self.encoder: Encoder = STAGE_MODELS["encoder"](context(directory, "encoder"))
        self.llm: LLM = STAGE_MODELS["llm"](context(directory, "llm", **llm))

    def encoded(self, payload: Payload) -> list[tuple[Payload, bool]]:
        """The encoder's chunks for the language model, one unit per call."""
        media = sent("input", "encoder", payload)
        chunks = []
        for work in self.encoder.feed("r", "input", media, final=True):
            [result] = self.encoder.run([work])
            assert result.payload is not None
            chunks.append((sent("encoder", "llm", result.payload), work.last))
        return chunks


def sent(source: str, target: str, payload: Payload) -> Payload:
    made = TRANSFERS[source, target](stage_request("r"), StageOutput("r", payload=payload, finished=True))
    assert made is not None
    return made


def stage_request(
    name: str,
    upstreams: frozenset[str] = frozenset(),
    sampling: SamplingParams = FALLBACK,
    adapter: str | None = None,
) -> StageRequest:
    return StageRequest(
        name,
        "llm",
        Request(request_id=name, adapter=adapter),
        sampling,
        seed=0,
        upstreams=upstreams,
        downstreams=frozenset(),
        to_client=frozenset(),
    )


class Run:
    """Requests through an engine over the language model."""

    def __init__(self, stages: Stages, **config: Any) -> None:
        self.stages = stages
        self.engine = engine_over(stages.llm, AutoregressiveConfig(**{"num_blocks": 600, "block_size": 8, **config}))
        self.cached: dict[str, int] = {}

    def __call__(
        self, cases: tuple[Case, ...] | list[Case], tokens: int = TOKENS, adapters: Sequence[str | None] = (None,)
    ) -> dict[str, list[int]]:
        """The replies, by the case's name; with several `adapters` by adapter and name."""
        names = {
            (adapter, case): case.name if adapter is None else f"{adapter} {case.name}"
            for adapter in adapters
            for case in cases
        }
        for (adapter, case), name in names.items():
            self.add(name, self.stages.input.process(request_of(case)), tokens, adapter=adapter)
        return self.finish([*names.values()])

    def add(
        self,
        name: str,
        payload: Payload,
        tokens: int = TOKENS,
        chunks: list[tuple[Payload, bool]] | None = None,
        adapter: str | None = None,
    ) -> None:
        """`chunks`: what the encoder sends, where it is not what ours would."""
        media = bool(payload["media"])
        upstreams = frozenset({"input", "encoder"} if media else {"input"})
        sampling = SamplingParams(max_tokens=tokens).over(self.stages.llm.default_sampling).over(FALLBACK)
        self.engine.add(stage_request(name, upstreams, sampling, adapter))
        self.engine.feed(name, "input", sent("input", "llm", payload), final=True)
        if chunks is None and media:
            chunks = self.stages.encoded(payload)
        for chunk, final in chunks or ():
            self.engine.feed(name, "encoder", chunk, final=final)

    def two(self, payload: Payload, tokens: int) -> dict[int, list[int]]:
        """Two replies to one prompt with media."""
        sampling = SamplingParams(n=2, max_tokens=tokens).over(self.stages.llm.default_sampling).over(FALLBACK)
        self.engine.add(stage_request("r", frozenset({"input", "encoder"}), sampling))
        self.engine.feed("r", "input", sent("input", "llm", payload), final=True)
        for chunk, final in self.stages.encoded(payload):
            self.engine.feed("r", "encoder", chunk, final=final)
        replies: dict[int, list[int]] = {0: [], 1: []}
        while self.engine.has_work():
            for output in self.engine.step():
                assert output.error is None
                replies[output.index] += output.token_ids
            self.engine.audit()
        return replies

    def finish(self, names: list[str]) -> dict[str, list[int]]:
        replies: dict[str, list[int]] = {name: [] for name in names}
        self.cached = dict.fromkeys(names, 0)
        while self.engine.has_work():
            outputs = self.engine.step()
            self.engine.audit()
            for output in outputs:
                if output.error is not None:
                    raise output.error
                replies[output.request_id] += output.token_ids
                self.cached[output.request_id] += output.cached_tokens
        return replies
