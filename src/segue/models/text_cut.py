"""Texts that a request has cut to so many tokens: the options `truncate_prompt_tokens` and `truncation_side`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from segue.messages.errors import InvalidRequest, shown
from segue.messages.request import Request
from segue.messages.sampling import SIDES
from segue.models.prompt import WHOLE_CONTEXT

_SIDE = "right"
"""Where nothing is said: such models were trained on the beginnings of texts (vLLM's for them, too)."""


@dataclass(frozen=True)
class Cut:
    """Keep `most` tokens, those that the tokenizer adds among them; the rest is cut off on `side`."""

    most: int
    side: str = _SIDE

    def ids(self, ids: list[int]) -> list[int]:
        """Ids that a client sent: whatever they are, the others go."""
        return ids[-self.most :] if self.side == "left" else ids[: self.most]

    def encoded(self, tokenizer: Any, *texts: str, add_special_tokens: bool = True) -> Any:
        """What the tokenizer of transformers makes of a text, or of a pair, whose longer one is cut first.

        Raises `InvalidRequest` where its own tokens leave nothing of the text.
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
    """What the request says, None where it says nothing. `longest`: tokens that the model takes. Raises
    `InvalidRequest`."""
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
    """The side is no argument of a call, but a setting; the input stage takes one request at a time."""
    own, tokenizer.truncation_side = tokenizer.truncation_side, side
    try:
        yield
    finally:
        tokenizer.truncation_side = own
