"""The input stage of models that read a bare text and write none: a text → ids, as its tokenizer has them."""

from __future__ import annotations

import torch

from segue.engines.contract import Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import InvalidRequest, TooLong
from segue.messages.request import Request
from segue.models.input_stage import InputStage
from segue.models.prompt import (
    Tokenizer,
    check_text,
    checked_ids,
    client_tokens,
    given_as,
    own_tokens_only,
    tokenized,
)
from segue.models.text_cut import Cut, cut_of


class TextInput(InputStage):
    """A bare text or ids; there is no chat."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, longest: int) -> None:
        """Ids are below `vocab`, and at most `longest` of them make a text."""
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
