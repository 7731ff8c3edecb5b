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

from segue.bench.harness.process import Generate, serve_batches
from segue.bench.text.workload import TextRequest

BLOCK, CACHE_TOKENS = 32, 65536


class Options(msgspec.Struct, kw_only=True):
    """Options for loading the model; the process receives them as JSON in `argv`."""

    model_dir: str
    dtype: str
    threads: int


class Loaded(msgspec.Struct, tag=True):
    """The model is loaded."""


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One request's answer; times are time.monotonic(), one clock for all processes of a machine."""

    index: int
    token_ids: list[int]
    times: list[float]
    """Time of each token in the process."""


def load(options: Options) -> tuple[Loaded, Callable[[str], Generate[TextRequest]]]:
    """Load the model; ways of serving are `one`, `static` (both `generate`) and `continuous`."""
    import torch

    from segue.kernels import ensure_torchvision
    from segue.parallel.orders import dtype_of

    ensure_torchvision()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=dtype_of(options.dtype)).eval()
    continuous = _Continuous(model)

    def begin(way: str) -> Generate[TextRequest]:
        model.set_attn_implementation("sdpa")  # otherwise `generate_batch` uses flash attention if it is installed
        return continuous if way == "continuous" else partial(_generate, model)

    return Loaded(), begin


class _Clock:
    """A streamer that records the time of each step's tokens; the first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: object) -> None:
        if not self._prompt:
            self.times.append(time.monotonic())
        self._prompt = False

    def end(self) -> None:
        """Nothing to flush."""


def _generate(model: Any, requests: Sequence[TextRequest]) -> list[Answer]:
    """One call of `generate`, prompts left-padded to the longest; it ends with the longest answer."""
    import torch

    longest, most = max(len(one.prompt) for one in requests), max(one.tokens for one in requests)
    ids = torch.tensor([[0] * (longest - len(one.prompt)) + one.prompt for one in requests])
    mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in requests])
    clock = _Clock()
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=most,
            min_new_tokens=most,
            pad_token_id=0,
            streamer=clock,
        )
    return [
        Answer(
            index=one.index,
            token_ids=made[row, longest : longest + one.tokens].tolist(),
            times=clock.times[: one.tokens],
        )
        for row, one in enumerate(requests)
    ]


class _Continuous:
    """Calls of `generate_batch`, which must not run under `inference_mode`. Its manager is kept between calls, and
    recreated for answers of another length."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tokens = 0

    def __call__(self, requests: Sequence[TextRequest]) -> list[Answer]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        most = max(one.tokens for one in requests)
        if most != self._tokens:
            self._model.destroy_cached_continuous_batching_manager()
            self._tokens = most
        began = time.monotonic() - time.perf_counter()  # offset of the library's clock from ours
        outputs = self._model.generate_batch(
            inputs=[one.prompt for one in requests],
            generation_config=GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(block_size=BLOCK, num_blocks=CACHE_TOKENS // BLOCK),
            record_timestamps=True,
            warmup=False,
            persistent_manager=True,
        )
        return [_answer(one, output, began) for one, output in zip(requests, _in_order(outputs), strict=True)]


def _answer(one: TextRequest, output: Any, began: float) -> Answer:
    """`began`: offset that converts the library's clock to ours."""
    if output.error is not None:
        raise RuntimeError(f"generate_batch: {output.error}")
    if output.prompt_ids != one.prompt:
        raise RuntimeError("generate_batch returned its answers in another order than the prompts")
    times = [began + at for at in output.timestamps or []]
    return Answer(index=one.index, token_ids=output.generated_tokens[: one.tokens], times=times)


def _in_order(outputs: dict[str, Any]) -> list[Any]:
    """Sort by the number at the end of the library's ids (`req_7`)."""
    return [outputs[key] for key in sorted(outputs, key=lambda key: int(key.rpartition("_")[2]))]


if __name__ == "__main__":
    sys.exit(serve_batches(sys.argv[1:], Options, TextRequest, load))
