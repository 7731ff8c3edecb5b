"""The input stage of a language model: a request → prompt ids, by the checkpoint's tokenizer and chat template."""

from __future__ import annotations

import torch

from segue.engines.contract import LoadContext, Payload
from segue.graph.parts import TOKENS
from segue.media.arrays import EMBEDS
from segue.messages.errors import InvalidRequest
from segue.messages.request import Message, Request, TextPart
from segue.messages.units import ids_of
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.decoder.generation import context_length
from segue.models.shared.input_stage import InputStage
from segue.models.shared.library import PreTrainedTokenizerBase
from segue.models.shared.text.chat_template import goes_through_parts, read_chat_template
from segue.models.shared.text.going_on import after_a_reply, requests_of, without_second_end
from segue.models.shared.text.prompt import (
    check_length,
    check_text,
    checked_ids,
    client_tokens,
    given_as,
    own_tokens_only,
    templated,
    text_conversation,
    tokenized,
    truncated,
)
from segue.models.shared.text.prompt_embeds import check_idless, check_marked, in_place, read_embeds, read_parts
from segue.models.shared.text.tokenizer import marked_tokenizer, tokenizer_for

_TEXT_STAGE = "llm"


class InputProcessor(InputStage):
    """Accepts messages, a bare prompt or token ids."""

    takes_embeds = True
    goes_on = True

    def __init__(self, ctx: LoadContext) -> None:
        config = load_config(ctx)
        self._vocab: int = config.vocab_size
        self._longest = context_length(config, ctx.max_model_len)
        # a decoder may have narrower embeddings, which it projects to its hidden size (OPT)
        self._width: int = config.word_embed_proj_dim if "word_embed_proj_dim" in config else config.hidden_size
        self._most_bytes: int = ctx.options.get("max_prompt_embeds_bytes", 0)
        self._tokenizer = tokenizer_for(ctx)
        template = read_chat_template(ctx.model_dir)
        self._template = None if template is None else template.text
        marks = self._most_bytes and self._template is not None and self._tokenizer is not None
        self._marked = marked_tokenizer(ctx.model_dir) if marks else None

    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values."""
        form = given_as(request, embeds=True)
        whole = requests_of(request)
        if form == "prompt_embeds":
            return self._embedded(request)
        if parts := request.embedded():
            return self._embedded_parts(request, parts)
        ids: list[int] = []
        for number, one in enumerate(whole):
            if number:
                ids += ids_of(request.earlier[number - 1].units)
            ids += self._own_ids(one, ids, follows=bool(number))
            ids = truncated(ids, one, _TEXT_STAGE, self._longest)
        if not own_tokens_only(request):
            check_length(len(ids), self._longest, form)
        seen = client_tokens(ids, self._tokenizer) if TOKENS in request.modalities else {}
        return {"token_ids": torch.tensor(ids, dtype=torch.long), **seen}

    def _own_ids(self, request: Request, before: list[int], *, follows: bool) -> list[int]:
        """The ids of a request itself. `before`: those that it `follows`, if it does."""
        match given_as(request):
            case "messages" if follows:
                return without_second_end(self._templated(request, self._tokenizer, follows=True), before)
            case "messages":
                return self._templated(request, self._tokenizer)
            case "prompt":
                return tokenized(self._tokenizer, request, self._longest, _TEXT_STAGE)
            case _:
                return checked_ids(request.prompt_token_ids or [], self._vocab)

    def _embedded(self, request: Request) -> Payload:
        check_idless(request, _TEXT_STAGE, EMBEDS)
        embeds = read_embeds(request.prompt_embeds or b"", self._width, self._longest, self._most_bytes)
        return {"embeds": embeds}

    def _embedded_parts(self, request: Request, parts: list[TextPart]) -> Payload:
        """Messages with some parts as embeddings: each part has one mark in the text, which its rows replace."""
        field = parts[0].field
        check_idless(request, _TEXT_STAGE, field)
        rows = read_parts(parts, self._width, self._longest, self._most_bytes)
        marked = check_marked(self._marked, field)
        ids = in_place(self._templated(request, marked.tokenizer, marked.mark), marked.token, rows)
        check_length(len(ids), self._longest, "messages")
        return {"token_ids": torch.tensor(ids, dtype=torch.long), "embeds": torch.cat(rows)}

    def _templated(
        self, request: Request, tokenizer: PreTrainedTokenizerBase | None, mark: str = "", *, follows: bool = False
    ) -> list[int]:
        """Render and tokenize. `mark`: stands for parts that are embeddings. `follows`: only what follows a reply."""
        if tokenizer is None:
            raise InvalidRequest(
                "this checkpoint has no tokenizer; send prompt_token_ids in place of messages", field="messages"
            )
        if self._template is None:
            raise InvalidRequest(
                "this checkpoint has no chat template; send a prompt or prompt_token_ids in place of messages",
                field="messages",
            )
        in_parts, template = goes_through_parts(self._template), self._template

        def render(messages: list[Message]) -> str:
            return templated(
                tokenizer, template, text_conversation(messages, in_parts=in_parts, mark=mark), request.chat
            )

        text = after_a_reply(request.messages, render) if follows else render(request.messages)
        check_text(text, tokenizer, request, self._longest, _TEXT_STAGE, "messages")
        # the template has written the special tokens
        ids = list(tokenizer(text, add_special_tokens=bool(request.add_special_tokens))["input_ids"])
        if not ids:
            raise InvalidRequest("the chat template renders these messages as empty text", field="messages")
        return ids
