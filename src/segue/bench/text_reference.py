"""`python -m segue.bench.text_reference SOCKET_FD OPTIONS`: `transformers` serving completions, alone in its process.

One request at a time, static batches through `generate`, or `generate_batch`, the library's own continuous batching.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

import msgspec

from segue.bench.baseline_wire import LENGTH
from segue.bench.text_wire import Answer, Broken, Loaded, Options, Policy, ToReference, Work, frame, to_reference
from segue.bench.text_workload import TextRequest

Inbox = SimpleQueue[ToReference | None]
ATTENTION = {"one": "sdpa", "static": "sdpa", "continuous": "sdpa"}
BLOCK, CACHE_TOKENS = 32, 65536


def main(argv: list[str]) -> int:
    channel = socket.socket(fileno=int(argv[0]))
    options = msgspec.json.decode(argv[1], type=Options)
    # before torch is imported: the thread pools read it then
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    try:
        _serve(channel, options)
    # whatever the library raises, the benchmark must hear of it: it waits for an answer
    except Exception as error:
        channel.sendall(frame(Broken(f"{type(error).__name__}: {error}")))
        raise
    return 0


def _serve(channel: socket.socket, options: Options) -> None:
    import torch

    from segue.kernels import ensure_torchvision

    ensure_torchvision()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=getattr(torch, options.dtype)).eval()
    channel.sendall(frame(Loaded(torch.get_num_threads())))
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_read, args=(channel.makefile("rb"), inbox), daemon=True).start()
    continuous = _Continuous(model)
    policy = Policy("one", 1, 0.0)
    while (message := inbox.get()) is not None:
        if isinstance(message, Policy):
            policy = message
            model.set_attn_implementation(ATTENTION[policy.way])
            continue
        requests = _gather(inbox, message.request, policy)
        for answer in continuous(requests) if policy.way == "continuous" else _generate(model, requests):
            channel.sendall(frame(answer))


class _Clock:
    """A streamer that notes when each step's tokens were there; the first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: object) -> None:
        if not self._prompt:
            self.times.append(time.monotonic())
        self._prompt = False

    def end(self) -> None:
        """Nothing is held back."""


def _generate(model: Any, requests: Sequence[TextRequest]) -> list[Answer]:
    """One call of `generate`, prompts padded on the left to the longest; it ends with the longest answer."""
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
    """Calls of `generate_batch`, which must not be under `inference_mode`. Its manager is kept from call to call, and
    made anew for answers of another length."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tokens = 0

    def __call__(self, requests: Sequence[TextRequest]) -> list[Answer]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        most = max(one.tokens for one in requests)
        if most != self._tokens:
            self._model.destroy_cached_continuous_batching_manager()
            self._tokens = most
        began = time.monotonic() - time.perf_counter()  # the library's own clock, on ours
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
    """`began`: what the library's clock is behind ours."""
    if output.error is not None:
        raise RuntimeError(f"generate_batch: {output.error}")
    if output.prompt_ids != one.prompt:
        raise RuntimeError("generate_batch gave its answers in another order than it got the prompts")
    times = [began + at for at in output.timestamps or []]
    return Answer(index=one.index, token_ids=output.generated_tokens[: one.tokens], times=times)


def _in_order(outputs: dict[str, Any]) -> list[Any]:
    """By the number at the end of the ids that the library gives (`req_7`)."""
    return [outputs[key] for key in sorted(outputs, key=lambda key: int(key.rpartition("_")[2]))]


def _gather(inbox: Inbox, first: TextRequest, policy: Policy) -> list[TextRequest]:
    """The first request and those that wait or arrive within `gather` seconds, up to the batch's size."""
    batch = [first]
    until = time.monotonic() + policy.gather
    while len(batch) < policy.most:
        try:
            message = inbox.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            break
        assert isinstance(message, Work), "the policy changes only while nothing is under way"
        batch.append(message.request)
    return batch


def _read(stream: BinaryIO, inbox: Inbox) -> None:
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        inbox.put(to_reference.decode(stream.read(length)))
    inbox.put(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
