"""The input stage of models that read a bare text and write none: a text → the tokenizer's ids, optionally truncated by
the options `truncate_prompt_tokens` and `truncation_side`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from segue.engines.contract import Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import InvalidRequest, TooLong, shown
from segue.messages.request import Request
from segue.messages.sampling import SIDES
from segue.models.shared.input_stage import InputStage
from segue.models.shared.text.prompt import (
    WHOLE_CONTEXT,
    Tokenizer,
    check_text,
    checked_ids,
    client_tokens,
    given_as,
    own_tokens_only,
    tokenized,
)

_SIDE = "right"
"""The default side: such models were trained on the beginnings of texts (vLLM's default, too)."""


@dataclass(frozen=True)
class Cut:
    """Keep `most` tokens, the tokenizer's special tokens included; the rest is cut off on `side`."""

    most: int
    side: str = _SIDE

    def ids(self, ids: list[int]) -> list[int]:
        """Truncate ids that a client sent, special tokens or not."""
        return ids[-self.most :] if self.side == "left" else ids[: self.most]

    def encoded(self, tokenizer: Any, *texts: str, add_special_tokens: bool = True) -> Any:
        """The transformers tokenizer's result for a text, or for a pair, whose longer text is truncated first.

        Raises `InvalidRequest` if special tokens leave no space for the text.
        """
        own = tokenizer.num_special_tokens_to_add(pair=len(texts) > 1) if add_special_tokens else 0
        if self.most <= own:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {self.most}; the tokenizer adds {own} tokens to "
                f"{'two texts' if len(texts) > 1 else 'a text'}, so it must be at least {own + 1}",
                field="options.truncate_prompt_tokens",
            )
        with _sided(tokenizer, self.side):
            return tokenizer(*texts, add_special_tokens=add_special_tokens, truncation=True, max_length=self.most)


def cut_of(request: Request, longest: int) -> Cut | None:
    """The request's truncation, None if it has none. `longest`: the model's token limit. Raises `InvalidRequest`."""
    side = request.options.get("truncation_side")
    if side is not None and side not in SIDES:
        raise InvalidRequest(
            f"truncation_side is {shown(side)}; it must be {' or '.join(SIDES)}", field="options.truncation_side"
        )
    most = request.options.get("truncate_prompt_tokens")
    if most is None:
        return None
    if type(most) is not int or not (most == WHOLE_CONTEXT or 1 <= most <= longest):
        raise InvalidRequest(
            f"truncate_prompt_tokens is {shown(most)}; it must be from 1 to {longest}, or -1 for that",
            field="options.truncate_prompt_tokens",
        )
    return Cut(longest if most == WHOLE_CONTEXT else most, side or _SIDE)


@contextmanager
def _sided(tokenizer: Any, side: str) -> Iterator[None]:
    """Set the truncation side, which is a setting and not an argument; the input stage runs one request at a time."""
    own, tokenizer.truncation_side = tokenizer.truncation_side, side
    try:
        yield
    finally:
        tokenizer.truncation_side = own


class TextInput(InputStage):
    """Accepts a bare text or ids, no chat."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, longest: int) -> None:
        """Ids must be below `vocab`, and a text must have at most `longest` of them."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._longest = longest

    def process(self, request: Request) -> Payload:
        form = given_as(request)
        if form == "messages":
            raise InvalidRequest("this model has no chat; send a prompt or prompt_token_ids", field="messages")
        cut = cut_of(request, self._longest)
        if form == "prompt":
            ids = self._read(request, cut)
        else:
            ids = checked_ids(request.prompt_token_ids or [], self._vocab)
            ids = ids if cut is None else cut.ids(ids)
        if len(ids) > self._longest and not own_tokens_only(request):
            raise TooLong(f"the text has {len(ids)} tokens; this model takes at most {self._longest}", field=form)
        seen = client_tokens(ids, self._tokenizer) if TOKENS in request.modalities else {}
        return {"token_ids": torch.tensor(ids, dtype=torch.long), **seen}

    def _read(self, request: Request, cut: Cut | None) -> list[int]:
        if cut is None or self._tokenizer is None:
            return tokenized(self._tokenizer, request, self._longest, "")
        text = request.prompt or ""
        check_text(text, self._tokenizer, request, self._longest, "", "prompt", cut=True)
        read = cut.encoded(self._tokenizer, text, add_special_tokens=request.add_special_tokens is not False)
        if not (ids := list(read["input_ids"])):
            raise InvalidRequest("prompt is empty; give at least one token", field="prompt")
        return ids
