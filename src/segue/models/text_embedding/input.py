"""The input stage of a model of embeddings: a text → ids, as its tokenizer has them."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext, Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.models.context_length import whole_length
from segue.models.input_stage import InputStage
from segue.models.pretrained import load_config
from segue.models.prompt import checked_ids, client_tokens, given_as, own_tokens_only, tokenized
from segue.models.registry import read_config
from segue.models.text_embedding.recipe import read_recipe
from segue.models.tokenizer import load_tokenizer


class InputProcessor(InputStage):
    """A bare text or ids; there is no chat."""

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        self._vocab: int = config.vocab_size
        self._tokenizer = load_tokenizer(ctx.model_dir)
        own = read_recipe(ctx.model_dir, read_config(ctx.model_dir)).max_length
        unsaid = "sentence_bert_config.json no max_seq_length"
        self._longest = whole_length(config, own, unsaid, ctx.max_model_len)

    def process(self, request: Request) -> Payload:
        form = given_as(request)
        if form == "messages":
            raise InvalidRequest("this model has no chat; send a prompt or prompt_token_ids", field="messages")
        if form == "prompt":
            ids = tokenized(self._tokenizer, request, self._longest)
        else:
            ids = checked_ids(request.prompt_token_ids or [], self._vocab)
        if len(ids) > self._longest and not own_tokens_only(request):
            raise InvalidRequest(
                f"the text has {len(ids)} tokens; this model takes at most {self._longest}", field=form
            )
        seen = client_tokens(ids, self._tokenizer) if TOKENS in request.modalities else {}
        return {"token_ids": torch.tensor(ids, dtype=torch.long), **seen}
