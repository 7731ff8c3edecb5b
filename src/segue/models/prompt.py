"""What every input stage does with the text of a request: template arguments, truncation, tokens for the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from segue.engines.contract import Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import InvalidRequest
from segue.messages.request import ChatOptions, Message, Request

WHOLE_CONTEXT = -1
"""`truncate_prompt_tokens`: keep as many of the prompt's tokens as the context holds."""


class Tokenizer(Protocol):
    """What is asked here of a tokenizer of transformers."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


def template_arguments(chat: ChatOptions) -> dict[str, Any]:
    """What `apply_chat_template` gets besides messages and template."""
    return {
        "tools": chat.tools or None,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        **chat.template_kwargs,
    }


def turn(message: Message, content: Any) -> dict[str, Any]:
    """A message as templates read it, `content` in the form that this one's wants."""
    return {"role": message.role, "content": content, **message.extra}


def own_tokens_only(request: Request) -> bool:
    """The request wants its prompt as tokens and nothing else: it need not fit into any context."""
    return request.modalities == [TOKENS]


def truncated(ids: list[int], request: Request, stage: str, longest: int) -> list[int]:
    """The last `truncate_prompt_tokens` ids, as `stage`'s sampling has it; all of them where it has none.

    `longest`: tokens of the context; a prompt may have one fewer.
    """
    sampling = request.sampling.get(stage)
    keep = None if sampling is None else sampling.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == WHOLE_CONTEXT:
        keep = longest - 1
    if not 1 <= keep < longest:
        field = f"sampling.{stage}.truncate_prompt_tokens"
        raise InvalidRequest(
            f"{field} is {keep}; it must be from 1 to {longest - 1} (the context has {longest} tokens), or -1 for that",
            field=field,
        )
    return ids[-keep:]


def client_tokens(ids: Sequence[int], tokenizer: Tokenizer | None) -> Payload:
    """`{"tokens": …}`, to be put into the payload of a request that asks for the modality `tokens`."""
    listed = list(ids)
    if tokenizer is None:
        return {TOKENS: {"token_ids": listed, "token_strs": [], "text": ""}}
    # an id that the embedding has and the tokenizer has not (padding of the vocabulary) has no text
    strs = [token if token is not None else "" for token in tokenizer.convert_ids_to_tokens(listed)]
    text = tokenizer.decode(listed, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {TOKENS: {"token_ids": listed, "token_strs": strs, "text": text}}
