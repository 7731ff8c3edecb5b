"""Shared text handling of input stages: chat templates, checks, truncation, tokens for the client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import jinja2

from segue.engines.contract import Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import InvalidRequest, TooLong, shown
from segue.messages.request import ChatOptions, MediaPart, Message, Request, TextPart

MOST_CHARACTERS = 1 << 20
"""Maximum characters of a text; more if the context has more than this many `WIDE` tokens."""
WIDE = 64
"""Characters per token that no text exceeds on average."""
WHOLE_CONTEXT = -1
"""`truncate_prompt_tokens`: keep as many of the prompt's tokens as the context allows."""


_REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)
"""Exceptions of rendering: a template refuses messages (orders of roles) or meets unexpected values, and the library
cannot find the text to continue in the result."""


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that are used here."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


def template_arguments(chat: ChatOptions) -> dict[str, Any]:
    """The arguments of `apply_chat_template` besides messages and template."""
    return {
        "tools": chat.tools or None,
        "add_generation_prompt": chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        **chat.template_kwargs,
    }


def templated(owner: Any, template: str, conversation: list[dict[str, Any]], chat: ChatOptions) -> str:
    """Render a conversation with the chat template. `owner`: the tokenizer or processor that runs the template.

    Raises `InvalidRequest` if the template refuses the messages or their additional fields.
    """
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true; a reply is either continued or begun",
            field="continue_final_message",
        )
    try:
        return owner.apply_chat_template(
            conversation, chat_template=template, tokenize=False, **template_arguments(chat)
        )
    except _REFUSALS as error:
        raise InvalidRequest(f"the chat template refuses these messages: {error}", field="messages") from error


def turn(message: Message, content: Any) -> dict[str, Any]:
    """A message in the format of templates, `content` in the form that this template expects."""
    return {"role": message.role, "content": content, **message.extra}


def text_conversation(messages: list[Message], *, in_parts: bool = False, mark: str = "") -> list[dict[str, Any]]:
    """Text messages in the format of language models' templates: one text each, several parts on separate lines, and
    additional fields. `in_parts`: the template accepts several parts itself. `mark`: stands for a part that is
    embeddings.

    Arguments of tool calls, which OpenAI's clients send as JSON text, become objects for the template.
    """
    conversation = []
    for number, message in enumerate(messages):
        texts = []
        for index, part in enumerate(message.content):
            if not isinstance(part, TextPart):
                field = part.field or f"messages[{number}].content[{index}]"
                raise InvalidRequest(f"{field} is {part.kind}; this model takes text", field=field)
            texts.append(part.text if part.embeds is None else mark)
        content: Any = "\n".join(texts)
        if in_parts and len(texts) > 1:
            content = [{"type": "text", "text": text} for text in texts]
        conversation.append(with_calls(turn(message, content), number))
    return conversation


def with_calls(said: dict[str, Any], number: int) -> dict[str, Any]:
    """Message `number` with the arguments of its tool calls as objects."""
    if isinstance(calls := said.get("tool_calls"), list):
        said["tool_calls"] = [_call(call, f"messages[{number}].tool_calls") for call in calls]
    return said


def _call(call: Any, field: str) -> Any:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        raise InvalidRequest(f'{field} has {shown(call)}; a call is {{"function": {{…}}}}', field=field)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    except ValueError as error:
        raise InvalidRequest(f"{field} has arguments that are not JSON: {error}", field=field) from error


def given_as(request: Request, *, embeds: bool = False, media: bool = False) -> str:
    """The form of a request's prompt: `messages`, `prompt`, `prompt_token_ids` or, with `embeds`, `prompt_embeds`.
    Raises `InvalidRequest` unless it has exactly one. `media`: a prompt or ids may have media along with them."""
    with_media = (request.prompt is not None or request.prompt_token_ids is not None) and _media_only(request.messages)
    if with_media and not media:
        field = request.media()[0].field or "messages"
        raise InvalidRequest(
            f"{field} is given along with a prompt; this model takes media in messages only, if any", field=field
        )
    values = {
        "messages": None if with_media else request.messages or None,
        "prompt": request.prompt,
        "prompt_token_ids": request.prompt_token_ids,
        "prompt_embeds": request.prompt_embeds,
    }
    found = [name for name, value in values.items() if value is not None]
    if len(found) > 1:
        raise InvalidRequest(f"give either {found[0]} or {found[1]}, not both", field=found[1])
    if found == ["prompt_embeds"] and not embeds:
        raise InvalidRequest("this model takes no prompt_embeds; send its prompt in another form", field=found[0])
    if not found:
        raise InvalidRequest("messages is empty; give at least one", field="messages")
    return found[0]


def _media_only(messages: list[Message]) -> bool:
    parts = [part for message in messages for part in message.content]
    return bool(parts) and all(isinstance(part, MediaPart) for part in parts)


def checked_ids(ids: list[int], vocab: int, media: frozenset[int] = frozenset()) -> list[int]:
    """`prompt_token_ids`, checked to be ids of this model. `media`: ids that stand for media, which may lie outside the
    vocabulary."""
    if not ids:
        raise InvalidRequest("prompt_token_ids is empty; give at least one id", field="prompt_token_ids")
    for index, token in enumerate(ids):
        if not 0 <= token < vocab and token not in media:
            raise InvalidRequest(
                f"prompt_token_ids[{index}] is {token}; ids of this model are from 0 to {vocab - 1}",
                field=f"prompt_token_ids[{index}]",
            )
    return ids


def tokenized(tokenizer: Tokenizer | None, request: Request, longest: int, stage: str) -> list[int]:
    """A bare prompt's ids, with the tokenizer's own special tokens unless the request disables them.

    `longest`, `stage`: as for `check_text`.
    """
    if tokenizer is None:
        raise InvalidRequest("this checkpoint has no tokenizer; send prompt_token_ids", field="prompt")
    prompt = request.prompt or ""
    check_text(prompt, tokenizer, request, longest, stage, "prompt")
    ids = list(tokenizer(prompt, add_special_tokens=request.add_special_tokens is not False)["input_ids"])
    if not ids and not own_tokens_only(request):
        raise InvalidRequest("prompt is empty; give at least one token", field="prompt")
    return ids


def check_text(
    text: str, tokenizer: Tokenizer, request: Request, longest: int, stage: str, field: str, *, cut: bool = False
) -> None:
    """Raise `TooLong` for a text that cannot fit into `longest` tokens, before tokenizing all of it: that takes seconds
    per megabyte and blocks other requests. `stage`: the one whose sampling may truncate the prompt; `cut`: it is
    truncated in any case."""
    most = max(MOST_CHARACTERS, WIDE * longest)
    if len(text) > most:
        raise TooLong(
            f"the text has {len(text)} characters; with a context of {longest} tokens at most {most} are taken",
            field=field,
        )
    sampling = request.sampling.get(stage)
    if cut or own_tokens_only(request) or (sampling is not None and sampling.truncate_prompt_tokens is not None):
        return
    part = 8 * longest
    while part < len(text):
        # the end of a part may split a word; twice the context leaves no doubt
        if len(tokenizer(text[:part], add_special_tokens=False)["input_ids"]) >= 2 * longest:
            raise TooLong(
                f"the prompt has more than {2 * longest} tokens; the context is {longest} tokens", field=field
            )
        part *= 2


def check_length(length: int, longest: int, field: str, shares: str = "") -> None:
    """Raise `TooLong` if a prompt leaves no space for a new token. `shares`: its composition, for the message."""
    if length >= longest:
        raise TooLong(
            f"the prompt has {length} tokens{shares}; the context is {longest} tokens, so it may have at most "
            f"{longest - 1}",
            field=field,
        )


def own_tokens_only(request: Request) -> bool:
    """Whether the request asks only for its prompt's tokens: these need not fit into any context."""
    return request.modalities == [TOKENS]


def truncated(ids: list[int], request: Request, stage: str, longest: int, *, media: bool = False) -> list[int]:
    """The last `truncate_prompt_tokens` ids, from `stage`'s sampling, or the first if its `truncation_side` is `right`;
    all of them if it is not set.

    `longest`: tokens of the context; a prompt may have one fewer. `media`: some ids stand for media, which cannot be
    split. Raises `InvalidRequest`, also if another stage's prompt is to be truncated: clients do not write that prompt.
    """
    for name, params in request.sampling.items():
        if name != stage and params.truncate_prompt_tokens is not None:
            field = f"sampling.{name}.truncate_prompt_tokens"
            raise InvalidRequest(
                f"{field} is {params.truncate_prompt_tokens}; only the prompt of stage {stage!r} can be cut",
                field=field,
            )
    keep = request.sampling[stage].truncate_prompt_tokens if stage in request.sampling else None
    if keep is None:
        return ids
    if keep == WHOLE_CONTEXT:
        keep = longest - 1
    field = f"sampling.{stage}.truncate_prompt_tokens"
    if not 1 <= keep < longest:
        raise InvalidRequest(
            f"{field} is {keep}; it must be from 1 to {longest - 1} (the context has {longest} tokens), or -1 for that",
            field=field,
        )
    if media and len(ids) > keep:
        raise InvalidRequest(
            f"{field} is {keep}, but the prompt ({len(ids)} tokens) contains media, which cannot be cut",
            field=field,
        )
    return ids[:keep] if request.sampling[stage].truncation_side == "right" else ids[-keep:]


def client_tokens(ids: Sequence[int], tokenizer: Tokenizer | None) -> Payload:
    """`{"tokens": …}`: a payload entry for requests that ask for the modality `tokens`."""
    listed = list(ids)
    if tokenizer is None:
        return {TOKENS: {"token_ids": listed, "token_strs": [], "text": ""}}
    # padding ids of the vocabulary are in the embedding but not in the tokenizer, and have no text
    strs = [token if token is not None else "" for token in tokenizer.convert_ids_to_tokens(listed)]
    text = tokenizer.decode(listed, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {TOKENS: {"token_ids": listed, "token_strs": strs, "text": text}}
