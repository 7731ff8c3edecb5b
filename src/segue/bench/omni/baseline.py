"""`python -m segue.bench.omni.baseline SOCKET_FD OPTIONS`: the baselines, `transformers` in its own process, one
request at a time or in static batches.

The audio is complete when `generate` returns, so its time to first audio is its JCT. A streamer, which `generate`
passes on to the thinker, records the first token of the reply; its time counts from the client's request, although no
client receives it before the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import pairwise

import msgspec
import numpy as np

from segue.bench.harness.process import (
    GATHER_SECONDS,
    ChildProcess,
    Generate,
    ModelOptions,
    ReferenceDriver,
    same_environment,
    serve_batches,
)
from segue.bench.omni.outcome import FirstAudio, OmniDriver, Outcome
from segue.bench.omni.workload import BenchRequest


class Options(ModelOptions, kw_only=True):
    """Options for loading the baseline."""

    reference: str
    """The module whose `Reference` loads it."""
    device: str
    load_format: str
    suppressed_thinker: tuple[int, ...]
    suppressed_talker: tuple[int, ...]
    talker_ends: tuple[int, ...]


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded."""

    threads: int


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One request's answer. Times are time.monotonic(), one clock for all processes of a machine."""

    index: int
    batch: int
    """Number of requests served together with it, itself included."""
    began: float
    """Taken from the queue,"""
    prepared: float
    """processor finished,"""
    first_token: float
    """first token of the reply generated,"""
    thinker_done: float
    talker_done: float
    done: float
    """waveform complete."""
    prompt_tokens: int
    text_ids: list[int]
    code_ids: list[int]
    samples: bytes
    """float32 little-endian mono."""
    sample_rate: int
    gpu_bytes: int = 0
    """Peak GPU memory of the process so far."""


STATIC_BATCH = 8
"""Requests of a static batch at most."""
NAMES = {"one": "transformers one at a time", "static": "transformers static batches"}
BaselineProcess = ChildProcess[BenchRequest, Loaded, Answer]


def baseline_process(options: Options) -> BaselineProcess:
    environment = same_environment(options.threads)
    return ChildProcess("the baseline", "segue.bench.omni.baseline", options, Loaded, Answer, environment)


def baseline(way: str, process: BaselineProcess, silence: float, gather: float = GATHER_SECONDS) -> OmniDriver:
    """A side. `way`: a key of `NAMES`. `gather`: seconds that a batch which is not full waits for others."""
    made = partial(_outcome, silence=silence)
    return ReferenceDriver(NAMES[way], process, way, made, most=STATIC_BATCH, gather=gather)


def _outcome(request: BenchRequest, answer: Answer, sent: float, came: float, *, silence: float) -> Outcome:
    first = FirstAudio(silence)
    first.add(np.frombuffer(answer.samples, dtype="<f4"), answer.sample_rate, came)
    stages = ("queue", "input", "thinker", "talker", "vocoder")
    marks = (sent, answer.began, answer.prepared, answer.thinker_done, answer.talker_done, answer.done)
    return Outcome(
        index=request.index,
        kind=request.kind,
        jct=came - sent,
        ttft=answer.first_token - sent,
        prompt_tokens=answer.prompt_tokens,
        text_ids=answer.text_ids,
        codes=len(answer.code_ids),
        code_ids=answer.code_ids,
        batch=answer.batch,
        spans=[
            (stage, "waiting" if stage == "queue" else "busy", start - sent, end - sent)
            for stage, (start, end) in zip(stages, pairwise(marks), strict=True)
        ],
        **first.fields(sent),
    )


def load(options: Options) -> tuple[Loaded, Callable[[str], Generate[BenchRequest]]]:
    """Load the model; both ways of serving are the same call."""
    import torch

    reference = import_module(options.reference).Reference(options)
    return Loaded(torch.get_num_threads()), lambda way: reference.generate


if __name__ == "__main__":
    sys.exit(serve_batches(sys.argv[1:], Options, BenchRequest, load))
