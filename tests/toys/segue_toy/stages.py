"""The toy's stages. A request's options let a test stop a stage at a known point:

hold: {"stage": "counter" | "forward" | "tone", "at": index, "fifo": path}   wait there until the pipe is written;
    forward: where the counter computes that place of the sequence
fail_at: {"stage": ..., "at": index}                              raise there
die_at: {"stage": ..., "at": index}                               kill the worker there, each time
lost_at: {"stage": ..., "at": index, "once": path}                raise there what a CUDA device does that is gone, as
    long as the file is there, which is removed
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.autoregressive.contract import Fed, FlatBatch, KVSpec, Prompt, Then
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import LoadContext, Payload, StageOutput, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.messages.units import ids_of

VOCAB = 97
WIDTH = 4
SAMPLES_PER_TOKEN = 240


def next_token(token: int) -> int:
    """What greedy decoding gives after `token`."""
    return (5 * token + 3) % VOCAB


def text_of(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def stop_point(request: StageRequest, stage: str, index: int) -> None:
    options = request.request.options
    hold, fail, die = options.get("hold"), options.get("fail_at"), options.get("die_at")
    if die and die["stage"] == stage and die["at"] == index:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = options.get("lost_at")
    if lost and lost["stage"] == stage and lost["at"] == index and os.path.exists(lost["once"]):
        os.unlink(lost["once"])
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore of it")
    if fail and fail["stage"] == stage and fail["at"] == index:
        raise RuntimeError(f"told to fail at {index}")
    if hold and hold["stage"] == stage and hold["at"] == index and os.path.exists(hold["fifo"]):
        with open(hold["fifo"], "rb") as pipe:  # both opens wait for each other: the test knows that we are here
            pipe.read(1)


def said(request: Request) -> tuple[str, list[int]]:
    """The text of a request, and its ids."""
    text = "".join(part.text for turn in request.messages for part in turn.content if isinstance(part, TextPart))
    return text, request.prompt_token_ids or [1 + ord(letter) % (VOCAB - 1) for letter in text]


class Input:
    """Text to ids."""

    def __init__(self, ctx: LoadContext) -> None:
        ctx.progress(1.0, "nothing to load")

    def warm_up(self) -> None:
        pass

    def begin(self, request: StageRequest) -> tuple[Any, list[Work]]:
        message = request.request
        text, ids = said(message)
        for one in reversed(message.earlier):
            ids = [*said(one.request)[1], *ids_of(one.units), *ids]
        if "forbidden" in text:
            raise InvalidRequest("messages[0].content is 'forbidden'; say something else", field="messages[0].content")
        payload: Payload = {"token_ids": torch.tensor(ids)}
        if "tokens" in message.modalities:
            payload["tokens"] = {"token_ids": list(ids), "token_strs": [str(token) for token in ids], "text": text}
        if message.open:
            payload["then"] = "turn" if message.reply else "hold"
        return request.request_id, [Work(request.request_id, payload, last=not message.open)]

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        piece, item = payload["piece"], {"then": "end"}
        if piece is not None:
            ids = piece.prompt_token_ids or [1 + ord(letter) % (VOCAB - 1) for letter in piece.prompt]
            item = {"token_ids": torch.tensor(ids), "then": "turn" if piece.reply else "hold"}
        return [Work(state, item, last=final)]

    def run(self, works: list[Work]) -> list[Result]:
        return [Result(work.item) for work in works]

    def end(self, state: Any) -> None:
        pass


class Counter:
    """A decoder without attention: the next token depends on the last alone; captured rows hold the token's id."""

    def __init__(self, ctx: LoadContext) -> None:
        if ctx.options.get("broken"):
            raise RuntimeError("the weights are gone")
        self.device = ctx.device
        self.kv = KVSpec(1, 1, WIDTH, torch.float32, capture_width=WIDTH, capture_dtype=torch.float32)
        self.axes = 1
        self.vocab_size = VOCAB
        self.max_model_len = ctx.max_model_len or 512
        self.weight_bytes = 0
        self.conditioned = False
        self.end_token_ids = frozenset({0})
        self.vocabulary = Letters()
        self.default_sampling = SamplingParams(temperature=0.0, max_tokens=20)

    def begin(self, request: StageRequest) -> Any:
        return request

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        if "token_ids" not in payload:
            return Fed(closed=True)
        options = state.request.options
        held = {"request": state} if options.get("hold") or options.get("lost_at") else {}
        prompt = Prompt(token_ids=payload["token_ids"].tolist(), extras=held)
        return Fed(prompt=prompt, then=Then(payload.get("then", "end")))

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        return token_ids.to(torch.float32)[:, None].expand(-1, WIDTH)

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        for prompt, start, _ in batch.prompts:
            if prompt is not None and "request" in prompt.extras:
                stop_point(prompt.extras["request"], "forward", start)
        return embeds, embeds.clone()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        following = (5 * hidden[:, 0].round().long() + 3) % VOCAB
        return torch.nn.functional.one_hot(following, VOCAB).float() * 10

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return text_of([token for token in token_ids if token or not skip_special_tokens])


class Letters:
    """Every token but the end is a letter."""

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return [text_of([token]).encode() if token else b"" for token in token_ids]

    def name(self, token_id: int) -> str:
        return "<end>"

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text if letter != " "]


class Tone:
    """Ids to samples: each becomes 240 samples of its value."""

    voices = ("one", "two")

    def __init__(self, ctx: LoadContext) -> None:
        self.made: dict[str, int] = {}

    def warm_up(self) -> None:
        pass

    def begin(self, request: StageRequest) -> tuple[Any, list[Work]]:
        return {"request": request, "have": 0, "chunk": 0}, []

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        rows = payload.get("rows")
        start = int(payload.get("start", state["have"]))
        fresh = rows[max(0, state["have"] - start) :, 0].clone() if rows is not None else torch.zeros(0)
        item = (state["request"], state["have"], fresh)
        state["have"] += len(fresh)
        return [Work(state["request"].request_id, item, last=final)]

    def run(self, works: list[Work]) -> list[Result]:
        results = []
        for work in works:
            request, start, ids = work.item
            for index in range(start, start + len(ids)):
                stop_point(request, "tone", index)
            samples = (ids / VOCAB).repeat_interleave(SAMPLES_PER_TOKEN)
            results.append(Result({"samples": samples, "start": start * SAMPLES_PER_TOKEN, "sample_rate": 24000}))
        return results

    def end(self, state: Any) -> None:
        pass


def ids_forward(request: StageRequest, output: StageOutput) -> Payload | None:
    return output.payload


def rows_forward(request: StageRequest, output: TokenOutput) -> Payload | None:
    if output.token_ids:
        stop_point(request, "counter", output.first_index)
    if output.captured is None:
        return None
    return {"start": output.captured.start, "rows": output.captured.data}


STAGE_MODELS = {"input": Input, "counter": Counter, "tone": Tone}
TRANSFERS = {("input", "counter"): ids_forward, ("counter", "tone"): rows_forward}
