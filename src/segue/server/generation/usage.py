"""The cost of an answer: OpenAI's usage object, and Segue's timings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from segue.messages.deltas import Delta, Finished, TextDelta
from segue.server.generation.parameters import Answering


def usage_object(
    finished: Sequence[Finished], prompts: Sequence[Finished] | None = None, thought_tokens: int | None = None
) -> dict[str, Any]:
    """OpenAI's usage. Completion tokens are summed; the prompt counts once, or once per entry of `prompts`.
    `thought_tokens`: of all completions, if replies are parsed for thoughts."""
    read = Counter[str]()
    prompt_tokens = cached_tokens = 0
    for one in finished[:1] if prompts is None else prompts:
        prompt_tokens += one.usage.prompt_tokens
        cached_tokens += one.usage.cached_tokens
        read.update(one.usage.prompt_modalities)
    made = Counter[str]()
    for one in finished:
        made.update(one.usage.completion_modalities)
    completion = made.total()
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, **_by_kind(read)},
        "completion_tokens_details": {
            **_by_kind(made),
            **({} if thought_tokens is None else {"reasoning_tokens": thought_tokens}),
        },
    }


class RunningUsage:
    """The `usage` of stream events: the usage so far if the client wants it, else null before the last event."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._prompt = 0
        self._completion = 0

    def take_prompt(self, delta: Delta) -> None:
        """Count a delta's prompt tokens."""
        if isinstance(delta, TextDelta):
            self._prompt += len(delta.prompt_token_ids)

    def take(self, delta: Delta) -> None:
        """Count a delta's answer tokens."""
        if isinstance(delta, TextDelta):
            self._completion += len(delta.token_ids)

    def fields(self) -> dict[str, Any]:
        """The fields to add to an event."""
        if self._answering.continuous_usage:
            prompt, completion = self._prompt, self._completion
            total = prompt + completion
            return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}}
        return {"usage": None} if self._answering.include_usage else {}


def _by_kind(counts: Counter[str]) -> dict[str, int]:
    return {f"{kind}_tokens": count for kind, count in sorted(counts.items())}


def metrics_object(finished: Finished) -> dict[str, Any]:
    """The `return_metrics` fields of a choice."""
    metrics = finished.metrics
    return {
        "metrics": {
            "jct": metrics.jct,
            "ttft": metrics.ttft,
            "ttfa": metrics.ttfa,
            "rtf": metrics.rtf,
            "audio_seconds": metrics.audio_seconds,
            "attempts": metrics.attempts,
            "spans": [
                {"stage": stage, "what": what, "start": start, "end": end} for stage, what, start, end in metrics.spans
            ],
        }
    }
