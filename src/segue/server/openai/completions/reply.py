"""Builds a text completion's objects, whole or in chunks: OpenAI's legacy form with vLLM's additions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from segue.messages.deltas import (
    Choice,
    ChoiceEnded,
    Delta,
    Finished,
    TextDelta,
    TokenLogprobs,
    TokensDelta,
    TopToken,
    Usage,
)
from segue.server.generation.generations import early_end
from segue.server.generation.usage import metrics_object
from segue.server.openai.chat.request import prompt_logprobs_object, token_name
from segue.server.openai.completions.request import CompletionRequest


class LegacyLogprobs(msgspec.Struct):
    """Four lists with an entry per token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    """Offset of each token in the choice's text, summed from the lengths of the tokens' texts."""

    def extend(self, more: LegacyLogprobs) -> None:
        """Append the log-probabilities of the following tokens."""
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


class LogprobsWriter:
    """Builds the `logprobs` of one choice, piece by piece."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._offset = 0

    def write(self, logprobs: Iterable[TokenLogprobs | None], first: TopToken | None = None) -> LegacyLogprobs:
        """`first`: a token without a log-probability, such as the first of a prompt."""
        written = LegacyLogprobs()
        for one in logprobs:
            token = first if one is None else one.chosen
            text = "" if token is None else token.text
            written.tokens.append("" if token is None else token_name(token, as_id=self._as_ids))
            written.token_logprobs.append(None if one is None else one.chosen.logprob)
            written.top_logprobs.append(None if one is None else _by_name(one, as_ids=self._as_ids))
            written.text_offset.append(self._offset)
            self._offset += len(text)
        return written


def _by_name(one: TokenLogprobs, *, as_ids: bool) -> dict[str, float]:
    """The most likely tokens and the chosen one. Of tokens with equal text (parts of characters), the likeliest
    stays."""
    by_name: dict[str, float] = {}
    for token in (*one.top, one.chosen):
        name = token_name(token, as_id=as_ids)
        by_name[name] = max(token.logprob, by_name.get(name, token.logprob))
    return by_name


class PromptFacts:
    """The reported facts of one prompt, collected before any output of its choices is sent."""

    def __init__(self, completion: CompletionRequest, number: int) -> None:
        request = completion.requests[number]
        sent = completion.prompts[completion.slots[number].prompt]
        self._text = sent if isinstance(sent, str) else None
        self._tokens: TokensDelta | None = None
        self._needs_tokens = "tokens" in request.modalities
        self._needs_first = completion.return_token_ids or any(
            params.prompt_logprobs is not None for params in request.sampling.values()
        )
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []

    def take(self, delta: Delta) -> None:
        """Record a delta's facts about the prompt."""
        if isinstance(delta, TokensDelta):
            self._tokens, self._needs_tokens = delta, False
        elif isinstance(delta, TextDelta) and delta.index == 0:
            self._needs_first = False
            self.token_ids += delta.prompt_token_ids
            self.logprobs += delta.prompt_logprobs
        elif isinstance(delta, Finished):
            self._needs_tokens = self._needs_first = False

    @property
    def ready(self) -> bool:
        """Whether all facts have arrived."""
        return not (self._needs_tokens or self._needs_first)

    @property
    def text(self) -> str:
        """The prompt's text as sent, or decoded from its ids."""
        if self._text is not None:
            return self._text
        return self._tokens.text if self._tokens is not None else ""

    @property
    def first_token(self) -> TopToken | None:
        """The prompt's first token, as far as it is known; it has no log-probability."""
        if self._tokens is None or not self._tokens.token_ids:
            return None
        return TopToken(self._tokens.token_ids[0], 0.0, 0, text := self._first_text(self._tokens), text.encode())

    def _first_text(self, tokens: TokensDelta) -> str:
        """The rest of the prompt's text before the other tokens."""
        rest = "".join(one.chosen.text for one in self.logprobs if one is not None)
        whole = tokens.text
        return whole[: len(whole) - len(rest)] if whole.endswith(rest) else next(iter(tokens.token_strs), "")


class CompletionChoice:
    """Builds the objects of one choice."""

    def __init__(self, completion: CompletionRequest, index: int, prompt: PromptFacts) -> None:
        self.index = index
        self._completion = completion
        self._prompt = prompt
        self._writer = LogprobsWriter(as_ids=completion.tokens_as_ids)
        self.ended = False
        """Whether its end was sent."""

    def opening(self) -> dict[str, Any] | None:
        """The entry with the prompt's facts, if any are requested."""
        completion, prompt = self._completion, self._prompt
        entry = self._entry()
        if completion.echo:
            entry["text"] = prompt.text
            if completion.logprobs is not None:
                entry["logprobs"] = self._writer.write(prompt.logprobs, prompt.first_token)
        if completion.wants_prompt_logprobs:
            entry["prompt_logprobs"] = prompt_logprobs_object(prompt.logprobs)
        if completion.return_token_ids:
            entry |= {"prompt_token_ids": prompt.token_ids, "token_ids": []}
        wanted = completion.echo or completion.wants_prompt_logprobs or completion.return_token_ids
        return entry if wanted else None

    def text(self, delta: TextDelta) -> dict[str, Any] | None:
        """New text. A delta with tokens but no text is sent too, because a client may count them."""
        if not self._completion.generates or not (delta.text or delta.token_ids):
            return None
        entry = self._entry()
        entry["text"] = delta.text
        if self._completion.logprobs is not None:
            entry["logprobs"] = self._writer.write(delta.logprobs)
        if self._completion.return_token_ids:
            entry["token_ids"] = delta.token_ids
        return entry

    def ending(self, finished: Finished, choice: Choice | None) -> dict[str, Any]:
        """The last entry. `choice`: the output's own end, if the request made several."""
        entry = self._entry()
        reason = finished.finish_reason if choice is None else choice.finish_reason
        entry["finish_reason"] = reason if self._completion.generates else "length"
        entry["stop_reason"] = choice.stop_reason if choice is not None and self._completion.generates else None
        if self._completion.return_metrics:
            entry["segue"] = metrics_object(finished)
        return entry

    def _entry(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"))
        return {"index": self.index, "text": "", **nothing}


def joined(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the entries of one choice into a whole one."""
    whole: dict[str, Any] = {"prompt_logprobs": None}
    for entry in entries:
        for key, value in entry.items():
            old = whole.get(key)
            if key in ("text", "token_ids") and old is not None and value is not None:
                whole[key] = old + value
            elif isinstance(value, LegacyLogprobs) and isinstance(old, LegacyLogprobs):
                old.extend(value)
            elif value is not None or key not in whole:
                whole[key] = value
    return whole


class CompletionReader:
    """Converts deltas of requests to entries of `choices`, in an order that clients can follow."""

    def __init__(self, completion: CompletionRequest) -> None:
        self._completion = completion
        self._prompts = [PromptFacts(completion, number) for number in range(len(completion.requests))]
        self._waiting: dict[int, list[Delta]] = {number: [] for number in range(len(completion.requests))}
        """Per request: deltas that wait for its prompt's facts."""
        self._choices: dict[int, CompletionChoice] = {}
        self.finished: list[Finished] = []
        self.prompts: list[Finished] = []
        """One per prompt."""

    def read(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        """The entries that may be sent now."""
        prompt = self._prompts[number]
        if not prompt.ready:
            prompt.take(delta)
        held = self._waiting.get(number)
        if held is not None:
            held.append(delta)
            if not prompt.ready:
                return []
            del self._waiting[number]
        return [entry for one in ([delta] if held is None else held) for entry in self._tell(number, one)]

    def _tell(self, number: int, delta: Delta) -> list[dict[str, Any]]:
        if isinstance(delta, TextDelta):
            opening, choice = self._choice(number, delta.index)
            return [entry for entry in (*opening, choice.text(delta)) if entry is not None]
        if isinstance(delta, ChoiceEnded) and not self._completion.return_metrics:  # metrics come only at the very end
            return self._end(number, early_end(delta))
        if not isinstance(delta, Finished):
            return []
        if not self._completion.generates:
            delta = msgspec.structs.replace(delta, usage=_nothing_made(delta.usage))
        self.finished.append(delta)
        slot = self._completion.slots[number]
        if slot.first == 0:
            self.prompts.append(delta)
        return self._end(number, delta)

    def _end(self, number: int, finished: Finished) -> list[dict[str, Any]]:
        """The ends of the choices whose end was not sent yet."""
        entries = []
        ends: list[Choice | None] = [*finished.choices] or [None]
        for end in ends:
            opening, choice = self._choice(number, 0 if end is None else end.index)
            if not choice.ended:
                choice.ended = True
                entries += [*opening, choice.ending(finished, end)]
        return entries

    def _choice(self, number: int, output: int) -> tuple[list[dict[str, Any]], CompletionChoice]:
        """(opening entries, if this is its first output; the choice)."""
        slot = self._completion.slots[number]
        index = slot.prompt * self._completion.choices_each + slot.first + output
        if index in self._choices:
            return [], self._choices[index]
        choice = self._choices[index] = CompletionChoice(self._completion, index, self._prompts[number])
        opening = choice.opening()
        return [opening] if opening is not None else [], choice


def _nothing_made(usage: Usage) -> Usage:
    return msgspec.structs.replace(usage, completion_modalities={})
