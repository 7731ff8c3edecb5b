"""The input stage of a cross-encoder: two texts → the ids of both, joined by its tokenizer."""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import ConfigError, InvalidRequest, TooLong
from segue.messages.request import Request
from segue.models.shared.input_stage import InputStage
from segue.models.shared.text.prompt import check_text, client_tokens, given_as, own_tokens_only
from segue.models.shared.text.sequence_classifier import longest_row
from segue.models.shared.text.text_input import cut_of
from segue.models.shared.text.tokenizer import load_tokenizer


class InputProcessor(InputStage):
    """Takes `prompt` and the option `text_pair`. Token ids are refused: they do not show where the second text
    begins."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError`."""
        tokenizer = load_tokenizer(ctx.model_dir)
        if tokenizer is None:
            raise ConfigError(f"{ctx.model_dir}: a cross-encoder needs its tokenizer; there is none", field="model")
        self._tokenizer: Any = tokenizer
        self._longest = longest_row(ctx, tokenizer.model_max_length)

    def warm_up(self) -> None:
        """Process one short pair."""
        self.result(Request(request_id="warm-up", prompt="Who?", options={"text_pair": "Good morning!"}))

    def process(self, request: Request) -> Payload:
        form = given_as(request)
        if form != "prompt":
            raise InvalidRequest("this model compares two texts; send a prompt and the option text_pair", field=form)
        first = request.prompt or ""
        if own_tokens_only(request):
            ids = self._tokenizer(first, add_special_tokens=request.add_special_tokens is not False)["input_ids"]
            return {"token_ids": torch.tensor(ids, dtype=torch.long), **client_tokens(ids, self._tokenizer)}
        second = request.options.get("text_pair")
        if not isinstance(second, str):
            raise InvalidRequest(
                f"text_pair is {second!r}; it must be the text to compare the prompt with", field="options.text_pair"
            )
        cut = cut_of(request, self._longest)
        for text, field in ((first, "prompt"), (second, "options.text_pair")):
            check_text(text, self._tokenizer, request, self._longest, "", field, cut=cut is not None)
        read = self._tokenizer(first, second) if cut is None else cut.encoded(self._tokenizer, first, second)
        ids = read["input_ids"]
        if not ids:
            raise InvalidRequest("prompt and text_pair are empty; give at least one token", field="prompt")
        if len(ids) > self._longest:
            raise TooLong(
                f"the two texts have {len(ids)} tokens; this model takes at most {self._longest}", field="prompt"
            )
        payload = {"token_ids": torch.tensor(ids, dtype=torch.long)}
        if (types := read.get("token_type_ids")) is not None:
            payload["token_type_ids"] = torch.tensor(types, dtype=torch.long)
        seen = client_tokens(ids, self._tokenizer) if TOKENS in request.modalities else {}
        return {**payload, **seen}
