"""The prompt of a request that goes on from earlier ones: what they read, their replies as they were generated, and
what follows.

A chat template writes whole conversations. What it writes after a reply is found with a mark in the place of one, so
neither the reply nor anything before it is rendered or tokenized again: it stays as the model read and wrote it,
thoughts included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from segue.messages.errors import InvalidRequest
from segue.messages.request import Message, Request, TextPart

MARK = "\ue000reply\ue001"
"""Stands for a reply: characters of private use, which templates pass on."""


def after_a_reply(messages: Sequence[Message], render: Callable[[list[Message]], str]) -> str:
    """Return what a chat template writes after a reply that `messages` follow. `render`: a conversation → its text.

    Raises `InvalidRequest` if the template does not write replies as they are."""
    before = [Message("user", [TextPart("?")]), Message("assistant", [TextPart(MARK)])]
    _, mark, text = render([*before, *messages]).rpartition(MARK)
    if not mark:
        raise InvalidRequest(
            "previous is set, but this model's chat template does not write replies as they are: send the whole "
            "conversation, or go on with a prompt",
            field="previous",
        )
    return text


def without_second_end(ids: list[int], before: Sequence[int]) -> list[int]:
    """Return ids that follow a reply, without the end token that a template writes if the model has drawn it."""
    return ids[1:] if before and ids[:1] == [before[-1]] else ids


def requests_of(request: Request) -> list[Request]:
    """Return a request and those before it, in order. Those that follow others are tokenized without special tokens,
    unless they ask for them. Raises `InvalidRequest` if one of several has embeddings, whose places have no ids."""
    first, *later = [*(one.request for one in request.earlier), request]
    if later and any(one.prompt_embeds is not None or one.embedded() for one in (first, *later)):
        raise InvalidRequest(
            "previous is set, but a part of the conversation is prompt_embeds: send it whole", field="previous"
        )
    return [first, *(msgspec.structs.replace(one, add_special_tokens=bool(one.add_special_tokens)) for one in later)]
