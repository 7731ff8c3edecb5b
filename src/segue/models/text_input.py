"""From what a client writes to prompt ids, as far as it is text: what the input stages of the families share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

from segue.media.sources import shown
from segue.messages.errors import ConfigError, InvalidRequest, TooLong
from segue.messages.request import ChatOptions, Message, Request, TextPart
from segue.models.library import PreTrainedTokenizerBase

GIVEN_AS = ("messages", "prompt", "prompt_token_ids")
_REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)
"""What a template raises for messages its model was not taught (orders of roles), and what running it on values that
it does not expect does."""


def given_as(request: Request) -> str:
    """Which of `GIVEN_AS` a request is. Raises `InvalidRequest` unless it is one, and not empty."""
    values = (request.messages or None, request.prompt, request.prompt_token_ids)
    found = [name for name, value in zip(GIVEN_AS, values, strict=True) if value is not None]
    if len(found) > 1:
        raise InvalidRequest(f"give either {found[0]} or {found[1]}, not both", field=found[1])
    if not found:
        raise InvalidRequest("messages is empty; give at least one", field="messages")
    if found == ["prompt_token_ids"] and not request.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids is empty; give at least one id", field="prompt_token_ids")
    return found[0]


def checked_ids(ids: list[int], vocab: int) -> list[int]:
    """`prompt_token_ids`, where they are ids of this model."""
    for index, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise InvalidRequest(
                f"prompt_token_ids[{index}] is {token}; ids of this model are from 0 to {vocab - 1}",
                field=f"prompt_token_ids[{index}]",
            )
    return ids


def prompt_ids(tokenizer: PreTrainedTokenizerBase | None, prompt: str) -> list[int]:
    """Raw text as the tokenizer has it, with the special tokens it adds by itself."""
    if tokenizer is None:
        raise InvalidRequest(
            "this checkpoint has no tokenizer; send prompt_token_ids in place of a prompt", field="prompt"
        )
    ids = list(tokenizer(prompt)["input_ids"])
    if not ids:
        raise InvalidRequest(f"prompt is {shown(prompt)}, which is no token; give at least one", field="prompt")
    return ids


def templated(owner: Any, template: str | None, conversation: list[dict[str, Any]], chat: ChatOptions) -> str:
    """A conversation as the chat template writes it. `owner`: the tokenizer or processor that runs the template.

    Raises `InvalidRequest` where the template refuses the messages, or what comes with them.
    """
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true; a reply is either continued or begun",
            field="continue_final_message",
        )
    try:
        return owner.apply_chat_template(
            conversation,
            chat_template=template,
            tools=chat.tools or None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tokenize=False,
            **_kwargs(chat),
        )
    except _REFUSALS as error:
        raise InvalidRequest(f"the chat template refuses these messages: {error}", field="messages") from error


_TAKEN = frozenset(
    ("conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message", "tokenize")
)


def _kwargs(chat: ChatOptions) -> dict[str, Any]:
    for name in chat.template_kwargs:
        if name in _TAKEN:
            field = f"chat_template_kwargs.{name}"
            raise InvalidRequest(
                f"{field} is not the template's to be told; it has a parameter of its own", field=field
            )
    return chat.template_kwargs


def text_conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages of text alone as templates of language models take them: one text each, and what comes with it.

    The arguments of tool calls, which OpenAI's clients send as JSON text, are objects for a template.
    """
    conversation = []
    for number, message in enumerate(messages):
        texts = []
        for index, part in enumerate(message.content):
            if not isinstance(part, TextPart):
                field = part.field or f"messages[{number}].content[{index}]"
                raise InvalidRequest(f"{field} is {part.kind}; this model takes text", field=field)
            texts.append(part.text)
        extra = dict(message.extra)
        if isinstance(calls := extra.get("tool_calls"), list):
            extra["tool_calls"] = [_call(call, f"messages[{number}].tool_calls") for call in calls]
        conversation.append({"role": message.role, "content": "".join(texts), **extra})
    return conversation


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


def check_length(length: int, longest: int, field: str, shares: str = "") -> None:
    """Raise `TooLong` where a prompt leaves no room for a token. `shares`: what it is made of, for the message."""
    if length >= longest:
        raise TooLong(
            f"the prompt has {length} tokens{shares}; the context is {longest} tokens, so it may have at most "
            f"{longest - 1}",
            field=field,
        )


def chat_template(model_dir: Path) -> str | None:
    """The template in a file of its own, if the checkpoint has one (a tokenizer may hold another)."""
    for name in ("chat_template.jinja", "chat_template.json"):
        path = model_dir / name
        if path.is_file():
            text = path.read_text()
            return text if path.suffix == ".jinja" else _from_json(path, text)
    return None


def _from_json(path: Path, text: str) -> str:
    try:
        template = json.loads(text)["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{path}: must hold {{"chat_template": "…"}}') from error
    if not isinstance(template, str):
        raise ConfigError(f"{path}: chat_template must be text")
    return template
