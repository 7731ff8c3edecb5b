"""What the tests of this family share: what the published code made of the tiny checkpoint, and the stages driven as a
worker drives them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import StageRequest
from segue.messages.request import ArrayInfo, MediaPart, Message, Part, Request, TextPart
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.speech.mimo_audio.llm import LLM
from segue.models.speech.mimo_audio.stages import TRANSFERS
from segue.models.speech.mimo_audio.tiny.config import CODES, IDS
from segue.models.speech.mimo_audio.vocoder import Vocoder

GOLDEN = Path(__file__).parent / "golden"
EVERY = 61
LAST = 40
RATE = 24000
MOST = 80
EMPTY = IDS["<|empty|>"]
WEIGHTS = ("model.safetensors", "audio_tokenizer/model.safetensors")
RECIPE = "run tests/models/speech/mimo_audio/golden/make_golden.py again"
GREEDY_CODES = {"audio_temperature": 0}
"""Of the stage `llm`: as the golden codes were drawn."""


@dataclass(frozen=True)
class Case:
    """One call of the published code, and what it gave."""

    name: str
    prompt: list[list[int]]
    rows: list[list[int]]
    samples: torch.Tensor | None
    """Every `EVERY`th one."""
    spoken: bool
    """The reply was speech, and ended with it."""

    @property
    def frames(self) -> torch.Tensor:
        """[n, K] codes of the reply."""
        return torch.tensor([row[1:] for row in self.rows if row[0] == EMPTY]).reshape(-1, len(CODES))


@cache
def golden() -> dict[str, torch.Tensor]:
    with safe_open(GOLDEN / "golden.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@cache
def cases() -> dict[str, Case]:
    tensors = golden()
    made = {}
    for one in json.loads((GOLDEN / "cases.json").read_text())["cases"]:
        name = one["name"]
        made[name] = Case(
            name,
            tensors[f"{name}.prompt"].tolist(),
            tensors[f"{name}.rows"].tolist(),
            tensors.get(f"{name}.samples"),
            f"{name}.samples" in tensors,
        )
    return made


def check_same_weights(directory: Path) -> None:
    """The golden tensors are those of this checkpoint."""
    made = hashlib.sha256()
    for name in WEIGHTS:
        made.update((directory / name).read_bytes())
    with safe_open(GOLDEN / "golden.safetensors", framework="pt") as file:
        assert file.metadata()["checkpoint"] == made.hexdigest(), f"another tiny checkpoint: {RECIPE}"


def recording(samples: int) -> np.ndarray:
    """As `make_golden` makes it: three other tones every tenth of a second."""
    rng, t = np.random.default_rng(samples), np.arange(samples) / RATE
    tones = rng.uniform((100, 0), (6000, 6), (3, -(-samples // 2400), 2)).repeat(2400, axis=1)[:, :samples]
    wave = np.sin(2 * np.pi * tones[..., 0] * t + tones[..., 1]).sum(axis=0)
    return (0.1 * wave + 0.01 * rng.standard_normal(samples)).astype(np.float32)


def drawn_codes(frames: int) -> torch.Tensor:
    """[frames, K], as `make_golden` draws them."""
    rng = np.random.default_rng(frames)
    return torch.from_numpy(np.stack([rng.integers(0, count, frames) for count in CODES], axis=1))


def said(role: str, *parts: str | int) -> Message:
    """A message of texts, and of recordings by their number of samples."""
    content: list[Part] = []
    for part in parts:
        if isinstance(part, str):
            content.append(TextPart(part))
        else:
            samples = recording(part)
            content.append(MediaPart("audio", samples.tobytes(), ArrayInfo("float32", samples.shape, RATE)))
    return Message(role, content)


def asked(*messages: Message, speech: bool = False, **options: Any) -> Request:
    return Request(request_id="r", messages=[*messages], modalities=["audio"] if speech else ["text"], options=options)


def context(model_dir: Path, stage: str, **more: Any) -> AutoregressiveContext:
    return AutoregressiveContext(model_dir, stage, torch.device("cpu"), torch.float32, **more)


def stage_request(stage: str, request_id: str = "r", *, spoken: bool = False, **more: Any) -> StageRequest:
    return StageRequest(
        request_id=request_id,
        stage=stage,
        request=more.pop("request", None) or Request(request_id=request_id),
        sampling=more.pop("sampling", SamplingParams(temperature=0.0, max_tokens=MOST)).over(FALLBACK),
        seed=more.pop("seed", 0),
        upstreams=frozenset({"llm" if stage == "vocoder" else "input"}),
        downstreams=frozenset({"vocoder"}) if spoken else frozenset(),
        to_client=frozenset({"text"}) if stage == "llm" else frozenset(),
        **more,
    )


@dataclass
class Reply:
    """What came of one request."""

    rows: list[list[int]] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    """The patches that left for the vocoder."""
    text: str = ""
    finish: str = ""
    cached: int = 0


class Replies:
    """Prompts through the language model in its engine; recordings as their codes."""

    def __init__(self, llm: LLM, **config: Any) -> None:
        self.engine = AutoregressiveEngine(llm, AutoregressiveConfig(**{"num_blocks": 400, **config}))

    def __call__(
        self, asked: Sequence[Case], resume: dict[str, list[list[int]]] | None = None, **more: Any
    ) -> dict[str, Reply]:
        """`resume`: rows of each request that were made before; `more`: sampling parameters."""
        replies = {case.name: Reply() for case in asked}
        requests = {}
        for case in asked:
            sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": MOST, **more})
            request = stage_request(
                "llm", case.name, spoken=case.spoken, sampling=sampling, resume=(resume or {}).get(case.name, [])
            )
            requests[case.name] = request
            self.engine.add(request)
            codes = torch.tensor([row[1:] for row in case.prompt if row[0] == EMPTY], dtype=torch.long)
            if len(codes):
                cut = len(codes) // 2  # two recordings
                media = [{"index": 1, "codes": codes[cut:]}, {"index": 0, "codes": codes[:cut]}]
                self.engine.feed(case.name, "encoder", {"media": media}, final=True)
            ids = torch.tensor([row[0] for row in case.prompt])
            self.engine.feed(case.name, "input", {"token_ids": ids}, final=True)
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                one = replies[output.request_id]
                one.rows += output.codes
                one.text += output.text
                one.cached += output.cached_tokens
                if (chunk := TRANSFERS["llm", "vocoder"](requests[output.request_id], output)) is not None:
                    assert chunk["start"] == len(one.sent)
                    one.sent += chunk["codes"].tolist()
                if output.finished:
                    one.finish = output.finish_reason
            self.engine.audit()
        return replies


def wave_of(vocoder: Vocoder, patches: list[list[int]], split: Sequence[int] = ()) -> torch.Tensor:
    """The samples of an utterance; `split`: patches that arrive at once."""
    state, _ = vocoder.begin(stage_request("vocoder"))
    made: list[torch.Tensor] = []
    at = 0
    for size in (*split, len(patches)):
        rows, at = patches[at : at + size], at + size
        payload = {"codes": torch.tensor(rows, dtype=torch.long), "start": at - size}
        for work in vocoder.feed(state, "llm", payload, final=at >= len(patches)):
            [result] = vocoder.run([work])
            assert result.payload is not None
            made.append(result.payload["samples"])
        if at >= len(patches):
            break
    return torch.cat(made)
