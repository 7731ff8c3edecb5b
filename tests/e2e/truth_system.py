"""The whole system on the tiny checkpoint, and what transformers says to the same prompts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.media.video import decode_video
from segue.messages.deltas import Delta
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart
from segue.messages.sampling import SamplingParams
from segue.messages.stats import Histogram
from segue.models.model_graph import ModelGraph
from segue.models.omni.qwen2_5_omni.reference import Reference, Reply
from segue.models.shared.library import AutoModelForCausalLM
from segue.models.shared.omni.chat import audio_of_videos
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import Collector, RequestOutput

T = TypeVar("T")

WITHIN = {1: 2e-4, "all": 1e-5}
"""Largest difference between samples (their rms is 0.02 to 0.5), by look-ahead of the vocoder."""
SAME = 2e-5
"""Largest difference between samples of two runs of our own: sums are rounded in another order in another batch."""
FILES = {"image": "photo.jpg", "audio": "speech.wav", "video": "video.mp4"}
LIMITS = MediaLimits()


@dataclass(frozen=True)
class Case:
    """One user message: a part for each of `kinds`, then `text`."""

    name: str
    text: str
    kinds: tuple[str, ...] = ()
    with_audio: bool = False
    voice: str = "Chelsie"
    seed: int = 7
    tokens: int = 40
    codes: int = 70

    def prompt(self, assets: Path, **changes: Any) -> dict[str, Any]:
        """What a caller of `Omni` writes."""
        parts: list[Any] = [{"type": kind, kind: str(assets / FILES[kind])} for kind in self.kinds]
        limits = {"thinker": self.tokens, "talker": self.codes}
        greedy = {stage: SamplingParams(temperature=0.0, max_tokens=most) for stage, most in limits.items()}
        sampling = changes.pop("sampling", {})
        return {
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}],
            "modalities": ["text", "audio"],
            "voice": self.voice,
            "seed": self.seed,
            "sampling": {stage: sampling.get(stage, greedy[stage]) for stage in greedy},
            "options": {"use_audio_in_video": True} if self.with_audio else {},
            **changes,
        }


CASES = (
    Case("text", "write a few words about the sea and the hills behind it"),
    Case("image", "What is this?", ("image",), seed=8),
    Case("audio", "What was said?", ("audio",), seed=9),
    Case("video", "What happens here?", ("video",), seed=10, voice="Ethan"),
    Case("video with sound", "What happens, and what is heard?", ("video",), with_audio=True, seed=11),
    Case("mixed", "Tell me of all three.", ("image", "audio", "video"), seed=12),
)
BY_NAME = {case.name: case for case in CASES}
LONG = Case("long", "Say something about the sea.", tokens=60, codes=120, seed=13)
"""Speaks long enough for several windows of the vocoder."""
LONG_MIXED = Case("long mixed", "Sing.", ("image", "audio", "video"), tokens=60, codes=120, seed=14)


class Truth:
    """transformers' answers, each made once."""

    def __init__(self, reference: Reference, assets: Path) -> None:
        self.reference = reference
        self.assets = assets
        self._replies: dict[Case, Reply] = {}

    def inputs(self, case: Case) -> Any:
        """What the library's processor makes of a case."""
        media: dict[str, Any] = {}
        heard: list[Any] = []
        origin: list[int | None] = []
        for kind in case.kinds:
            path = self.assets / FILES[kind]
            if kind == "image":
                media["images"] = [Image.open(path)]
            elif kind == "audio":
                heard.append(decode_audio(MediaPart("audio", path.read_bytes()), 16000, LIMITS))
                origin.append(None)
            else:
                rate = 16000 if case.with_audio else None
                clip = decode_video(MediaPart("video", path.read_bytes()), 2.0, LIMITS, audio_rate=rate)
                media["videos"] = [clip.frames]
                if case.with_audio:
                    heard.append(clip.audio)
                    origin.append(0)
        if heard:
            media["audio"] = heard
        if case.with_audio:
            media |= audio_of_videos(origin)
        return self.reference.inputs(case.text, *case.kinds, **media)

    def of(self, case: Case) -> Reply:
        if case not in self._replies:
            self._replies[case] = self.fresh(case)
        return self._replies[case]

    def fresh(self, case: Case, **more: Any) -> Reply:
        """The same, asked again: for references that are changed on purpose."""
        return self.reference.generate(
            self.inputs(case),
            max_tokens=case.tokens,
            max_codes=case.codes,
            speaker=case.voice,
            noise_seed=case.seed,
            use_audio_in_video=case.with_audio,
            **more,
        )

    def check(self, output: RequestOutput, case: Case, *, within: float = WITHIN[1]) -> None:
        assert_equals(output, self.of(case), self.reference, within=within)


def assert_equals(output: RequestOutput, reply: Reply, reference: Reference, *, within: float) -> None:
    """Tokens, text and codes equal, samples within a tolerance."""
    assert output.token_ids["thinker"] == reply.token_ids, "thinker's tokens"
    text = reference.processor.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
    assert output.text == text, "text"
    codes = output.token_ids["talker"]
    assert codes[: len(reply.codes)] == reply.codes, "talker's codes"
    assert len(codes) == len(reply.codes) + reply.speech_ended, "number of codes"
    assert output.audio is not None
    samples = reply.samples.detach().numpy().reshape(-1)
    assert output.audio.sample_rate == 24000
    assert output.audio.samples.shape == samples.shape, "number of samples"
    assert apart(output.audio.samples, samples) < within, "waveform"


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    """Two runs of our own."""
    assert one.token_ids == other.token_ids
    assert one.text == other.text
    assert one.finish_reason == other.finish_reason
    assert (one.audio is None) == (other.audio is None)
    if one.audio is not None and other.audio is not None:
        assert one.audio.samples.shape == other.audio.samples.shape
        assert apart(one.audio.samples, other.audio.samples) < SAME


def library_answers(directory: Path, prompts: list[list[int]], tokens: int, **more: Any) -> list[list[int]]:
    """What a language model of transformers says to prompts of ids, greedy; `more`: of `generate`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0, **more
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max(initial=0.0))


async def until(true: Callable[[], bool]) -> None:
    """Let the loop's other tasks run until it is so."""
    while not true():
        await asyncio.sleep(0)


class System:
    """A running model on an event loop of its own."""

    def __init__(self, model_dir: Path | ModelGraph, **config: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._killed: set[int] = set()
        self.omni = AsyncOmni(model_dir, dtype="float32", config=config)
        try:
            self.run(self.omni.start())
        except BaseException:
            self._close_loop()
            raise

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(body, timeout=600))

    def in_time(self, attempt: Callable[[], Coroutine[Any, Any, T]], hit: Callable[[T], bool]) -> T:
        """What comes of requests one of whose workers is killed while it is at work on them.

        A kill follows what the client hears. On a busy machine the stage may be done before that is heard; then its
        death is no matter to the request, and all of it is asked once more.
        """
        for _ in range(20):
            self.run(self.replaced())
            found = self.run(attempt())
            if hit(found):
                break
        return found

    async def replaced(self) -> None:
        """Nobody is given to a worker that was killed any more."""
        replicas = self.omni.orchestrator.replicas.all
        await until(lambda: all(one.state == "ready" and one.pid not in self._killed for one in replicas))
        self._killed.clear()  # numbers of processes come again

    def ask(self, *prompts: Any) -> list[RequestOutput]:
        """All at once."""

        async def all_of() -> list[RequestOutput]:
            return await asyncio.gather(*(self.omni.generate(prompt) for prompt in prompts))

        return self.run(all_of())

    async def collect(self, prompt: Any, on_delta: Callable[[Delta], None] = lambda delta: None) -> RequestOutput:
        """One request; `on_delta` is called in the order of the stream."""
        request = self.omni.request(prompt)
        collector = Collector(request.request_id, wants_audio="audio" in request.modalities)
        async for delta in self.omni.stream(request):
            on_delta(delta)
            collector.add(delta)
        return collector.output()

    async def observe(
        self, prompt: Any, on_delta: Callable[[Delta], None] = lambda delta: None
    ) -> tuple[RequestOutput, list[Delta]]:
        """The same, with all that was streamed."""
        deltas: list[Delta] = []

        def seen(delta: Delta) -> None:
            on_delta(delta)
            deltas.append(delta)

        return await self.collect(prompt, seen), deltas

    def pid(self, stage: str, replica: int = 0) -> int:
        pid = self.omni.health().stages[stage].replicas[replica].pid
        assert pid is not None
        return pid

    def follower(self, stage: str) -> psutil.Process:
        """The second rank of a stage of two. Another child of a worker, which compiles grammars, is forked after it."""
        children = psutil.Process(self.pid(stage)).children()
        return min(children, key=lambda child: (child.create_time(), child.pid))

    def kill(self, stage: str) -> None:
        self.kill_worker(self.pid(stage))

    def kill_worker(self, pid: int, victim: int | None = None) -> None:
        """`victim`: the follower that is killed, with which the worker ends."""
        self._killed.add(pid)
        os.kill(victim or pid, signal.SIGKILL)

    def stopped(self, stage: str) -> psutil.Process:
        """The stage's worker, stopped: whatever reaches it waits."""
        process = psutil.Process(self.pid(stage))
        process.suspend()
        return process

    async def stats(self, stage: str, name: str, enough: Callable[[dict[int, float]], bool]) -> dict[int, float]:
        """By replica, as soon as it is enough: workers report when they fall idle. Of a histogram: its count."""
        while True:
            reports = [one for stats in self.omni.orchestrator.stats.values() for one in stats.stages]
            values = {one.replica: one.values.get(name, 0.0) for one in reports if one.stage == stage}
            numbers = {
                replica: float(sum(value.counts)) if isinstance(value, Histogram) else value
                for replica, value in values.items()
            }
            if enough(numbers):
                return numbers
            await self.tick()

    async def admitted(self, count: int = 1) -> None:
        """So many requests are known to the orchestrator: the tasks that make them have run so far."""
        await until(lambda: len(self.omni.orchestrator.requests) >= count)

    async def all_ready(self) -> None:
        """A system serves as soon as every stage has a replica: wait for the others."""
        while any(r.state != "ready" for stage in self.omni.health().stages.values() for r in stage.replicas):
            await self.tick()

    async def tick(self) -> None:
        """The smallest request."""
        await self.omni.generate({"prompt_token_ids": [5], "sampling": SamplingParams(max_tokens=1)})

    async def refused(self) -> None:
        """A request that goes no farther than the input stage."""
        with pytest.raises(InvalidRequest):
            await self.omni.generate({"prompt_token_ids": [2**40]})

    def close(self) -> None:
        self.run(self.omni.stop())
        self._close_loop()

    def _close_loop(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def spans(output: RequestOutput) -> set[str]:
    """Stages that took part."""
    return {stage for stage, *_ in output.metrics.spans}


def longer(case: Case, **changes: Any) -> Case:
    return replace(case, **changes)
