"""The input stage of models that read a bare text and write none: a text → ids, as its tokenizer has them."""

from __future__ import annotations

import torch

from segue.engines.contract import Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import InvalidRequest, TooLong
from segue.messages.request import Request
from segue.models.input_stage import InputStage
from segue.models.prompt import Tokenizer, checked_ids, client_tokens, given_as, own_tokens_only, tokenized


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
        if form == "prompt":
            ids = tokenized(self._tokenizer, request, self._longest)
        else:
            ids = checked_ids(request.prompt_token_ids or [], self._vocab)
        if len(ids) > self._longest and not own_tokens_only(request):
            raise TooLong(f"the text has {len(ids)} tokens; this model takes at most {self._longest}", field=form)
        seen = client_tokens(ids, self._tokenizer) if TOKENS in request.modalities else {}
        return {"token_ids": torch.tensor(ids, dtype=torch.long), **seen}
