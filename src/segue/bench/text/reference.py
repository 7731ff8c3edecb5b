"""`python -m segue.bench.text.reference SOCKET_FD OPTIONS`: serve completions with `transformers` in its own process.

It serves one request at a time, static batches through `generate`, or `generate_batch`, the library's own continuous
batching.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from segue.bench.harness.library import Continuous, answers, generate, padded
from segue.bench.harness.process import Generate, Loaded, ModelOptions, serve_batches
from segue.bench.text.workload import TextRequest

CACHE_TOKENS = 65536


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One request's answer; times are time.monotonic(), one clock for all processes of a machine."""

    index: int
    token_ids: list[int]
    times: list[float]
    """Time of each token in the process."""


def load(options: ModelOptions) -> tuple[Loaded, Callable[[str], Generate[TextRequest]]]:
    """Load the model; ways of serving are `one`, `static` (both `generate`) and `continuous`."""
    import torch

    from segue.kernels import ensure_torchvision
    from segue.parallel.wire import dtype_of

    ensure_torchvision()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=dtype_of(options.dtype)).eval()
    continuous = Continuous(model, CACHE_TOKENS // Continuous.BLOCK, warmup=False)

    def begin(way: str) -> Generate[TextRequest]:
        model.set_attn_implementation("sdpa")  # otherwise `generate_batch` uses flash attention if it is installed
        return partial(_batched, continuous) if way == "continuous" else partial(_generate, model)

    return Loaded(), begin


def _generate(model: Any, requests: Sequence[TextRequest]) -> list[Answer]:
    """One call of `generate`; it ends with the longest answer."""
    ids, mask = padded([one.prompt for one in requests], model.device)
    made, times = generate(model, ids, mask, max(one.tokens for one in requests))
    start = ids.shape[1]
    return [
        Answer(index=one.index, token_ids=made[row, start : start + one.tokens].tolist(), times=times[: one.tokens])
        for row, one in enumerate(requests)
    ]


def _batched(continuous: Continuous, requests: Sequence[TextRequest]) -> list[Answer]:
    """One call of `generate_batch`."""
    tokens, prompts = max(one.tokens for one in requests), [one.prompt for one in requests]
    began = time.monotonic() - time.perf_counter()  # offset of the library's clock from ours
    found = answers(continuous.run(prompts, tokens, size=tokens), prompts)
    return [
        Answer(index=one.index, token_ids=ids[: one.tokens], times=[began + at for at in times])
        for one, (ids, times) in zip(requests, found, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(serve_batches(sys.argv[1:], ModelOptions, TextRequest, load))
