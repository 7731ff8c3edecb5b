"""Requests whose input comes in pieces, and what each turn must give: the answer to a request of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ar_adapter import Driver, TinyAdapter, stage_request

from segue.engines.autoregressive.contract import Fed, Prompt, Then
from segue.engines.contract import Payload, StageRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams, turn_seed

HOLD, TURN, END = Then.HOLD, Then.TURN, Then.END


class OpenAdapter(TinyAdapter):
    """Takes pieces: `{"prompt", "then"}`, or the end of the input: `{}`."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        prompt = payload.get("prompt")
        return Fed(closed=True) if prompt is None else Fed(prompt, then=payload.get("then", END))


def open_request(request_id: str, **fields: Any) -> StageRequest:
    return stage_request(request_id, request=Request(request_id=request_id, open=True), **fields)


def append(drive: Driver, request_id: str, tokens: Sequence[int] | Prompt, then: Then = HOLD) -> None:
    prompt = tokens if isinstance(tokens, Prompt) else Prompt(list(tokens))
    drive.engine.feed(request_id, "input", {"prompt": prompt, "then": then}, final=then is END)


def close(drive: Driver, request_id: str) -> None:
    drive.engine.feed(request_id, "input", {}, final=True)


def answer(alone: Driver, prompt: Sequence[int], sampling: SamplingParams, seed: int = 0, turn: int = 0) -> list[int]:
    """What a request of its own gives: the input sent at once, alone."""
    alone.results.clear()
    alone.add(stage_request("alone", seed=turn_seed(seed, turn), sampling=sampling), prompt)
    return alone.run()["alone"].token_ids


def turns_of(drive: Driver, request_id: str) -> list[list[int]]:
    """The units of each turn."""
    turns: list[list[int]] = [[]]
    for output in drive.results[request_id].outputs:
        assert not (output.turn_ended and output.finished)
        turns[-1] += output.token_ids
        if output.turn_ended:
            turns.append([])
    return turns if turns[-1] else turns[:-1]
