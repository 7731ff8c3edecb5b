"""The text that a request gives a model to say."""

from __future__ import annotations

from segue.messages.errors import InvalidRequest
from segue.messages.request import Message, Request, TextPart
from segue.models.shared.text.prompt import given_as


def form_of(request: Request) -> str:
    """`messages` or `prompt`: the one that the request has. Raises `InvalidRequest` for token ids, and for a text that
    is to be truncated."""
    form = given_as(request)
    if form == "prompt_token_ids":
        raise InvalidRequest("this model says a text; send a message in place of prompt_token_ids", field=form)
    for name, sampling in request.sampling.items():
        if sampling.truncate_prompt_tokens is not None:
            field = f"sampling.{name}.truncate_prompt_tokens"
            raise InvalidRequest(f"{field} is set, but this model says its whole text; leave it out", field=field)
    return form


def check_not_blank(text: str, form: str) -> None:
    """Raise `InvalidRequest` for a text without a word."""
    if not text.strip():
        raise InvalidRequest(f"{form} has no text to say", field=form)


def text_to_say(request: Request, advice: str = "") -> tuple[str, str]:
    """(the text of a bare prompt or of a single user message, the field that it is in). `advice`: appended to the error
    for other messages. Raises `InvalidRequest`."""
    form = form_of(request)
    if form == "prompt":
        text = request.prompt or ""
    else:
        messages = request.messages
        if len(messages) != 1 or messages[0].role != "user":
            raise InvalidRequest(f"this model says one text: send one user message{advice}", field="messages")
        text = text_of(messages[0], 0)
    check_not_blank(text, form)
    return text, form


def text_of(message: Message, number: int, advice: str = "") -> str:
    """The texts of message `number`, a line each. `advice`: appended to the error for other parts. Raises
    `InvalidRequest`."""
    texts = []
    for index, part in enumerate(message.content):
        if not isinstance(part, TextPart):
            field = part.field or f"messages[{number}].content[{index}]"
            raise InvalidRequest(f"{field} is {part.kind}; this model takes text{advice}", field=field)
        texts.append(part.text)
    return "\n".join(texts)
