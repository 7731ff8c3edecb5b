"""Log-probabilities in a chat completion: OpenAI's object for the output, vLLM's for the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from segue.messages.deltas import TokenLogprobs, TopToken
from segue.messages.errors import InvalidRequest, wrong


def asked_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """`SamplingParams.logprobs` from OpenAI's two parameters; how many there may be is up to the stage. Raises
    `InvalidRequest`."""
    if top_logprobs is not None and top_logprobs < -1:
        raise wrong("top_logprobs", top_logprobs, "at least 0, or -1 for all tokens")
    if top_logprobs and not logprobs:
        raise InvalidRequest(f"top_logprobs is {top_logprobs}, but logprobs is not true", field="top_logprobs")
    return (top_logprobs or 0) if logprobs else None


def token_name(token: TopToken, *, as_id: bool) -> str:
    """What a token is called: its text, or, as that is ambiguous, its id in vLLM's form."""
    return f"token_id:{token.token_id}" if as_id else token.text


def logprobs_object(tokens: Iterable[TokenLogprobs], *, as_ids: bool) -> dict[str, Any]:
    """The `logprobs` of a choice."""
    content = [
        {**_token(one.chosen, as_ids), "top_logprobs": [_token(top, as_ids) for top in one.top]} for one in tokens
    ]
    return {"content": content, "refusal": None}


def _token(token: TopToken, as_id: bool) -> dict[str, Any]:
    # tokens that stand for no text have no bytes either
    return {"token": token_name(token, as_id=as_id), "logprob": token.logprob, "bytes": list(token.data) or None}


def prompt_logprobs_object(tokens: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` of an answer: by position, token id → how likely it was there."""
    return [
        None
        if one is None
        else {
            str(token.token_id): {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text}
            for token in (one.chosen, *one.top)
        }
        for one in tokens
    ]
