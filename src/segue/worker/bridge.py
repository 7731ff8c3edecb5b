"""The input stage of a model that gets its input from other models: what they made becomes messages, or a prompt.

A link's transform is a function of what the model before it made: of a text, of samples and their rate, or of an image
([height, width, 3] uint8). It returns the same kind, or a list of messages as a chat request has them. If it returns
None or an empty text, the model gets nothing: the request ends with an error of the field `NOTHING`.

A model to which an edge returns goes on with its conversation: its first input, what it wrote, what came back, …

Optional reading: only for graphs of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from segue.engines.contract import StageRequest
from segue.engines.module.contract import ModuleModel, Work
from segue.graph.functions import function_at
from segue.media.arrays import audio_part, image_part
from segue.media.parts import PYTHON_POLICY, messages_from
from segue.messages.errors import InvalidRequest, SegueError, StageFailed, shown
from segue.messages.request import NOTHING, MediaPart, Message, Part, Received, Request, TextPart


@dataclass(slots=True)
class _Turn:
    """What a model got for one visit, or wrote in it."""

    role: str
    parts: list[Part] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    @property
    def text(self) -> str | None:
        """If it is one text."""
        only = self.parts[0] if len(self.parts) == 1 and not self.messages else None
        return only.text if isinstance(only, TextPart) else None


class Bridge:
    """A family's input stage (`ModuleModel`) for requests that hold what other models made (`Request.received`)."""

    def __init__(self, model: ModuleModel, transforms: Iterable[str], *, chats: bool) -> None:
        """`transforms`: as in `ModelSource`. `chats`: whether the checkpoint takes a text as a message, else as a
        prompt. Raises `ConfigError` for a function that cannot be imported."""
        self._model = model
        self._transforms = {name: function_at(name) for name in transforms}
        self._chats = chats
        self.warm_up, self.feed, self.run, self.end = model.warm_up, model.feed, model.run, model.end

    def begin(self, request: StageRequest) -> tuple[Any, list[Work]]:
        """As the family's input stage, on the messages. Raises `SegueError`."""
        return self._model.begin(replace(request, request=self._read(request.request)))

    def _read(self, request: Request) -> Request:
        if not request.received:  # it came from a client, who asks for tokens
            return request
        turns = [self._turn(own, list(together)) for (_, own), together in groupby(request.received, key=_turn_of)]
        texts = [turn.text for turn in turns]
        if request.prompt is not None or not (request.messages or self._chats or None in texts):
            if None in texts:
                raise InvalidRequest(
                    "the request has a prompt, to which only a text can be added when an edge returns; send messages",
                    field="prompt",
                )
            prompt = "".join([request.prompt or "", *(text for text in texts if text is not None)])
            return msgspec.structs.replace(request, prompt=prompt, received=[])
        messages = [*request.messages]
        for turn in turns:
            messages += turn.messages
            messages += [Message(turn.role, turn.parts)] if turn.parts else []
        return msgspec.structs.replace(request, messages=messages, received=[])

    def _turn(self, own: bool, received: list[Received]) -> _Turn:
        turn = _Turn("assistant" if own else "user")
        for one in received:
            made = self._made(one)
            if isinstance(made, list):
                turn.messages += made
            else:
                turn.parts.append(made)
        return turn

    def _made(self, received: Received) -> Part | list[Message]:
        """What becomes of a part: a part, or messages."""
        if not received.transform:
            return received.part
        transform = self._transforms[received.transform]
        where = f"the transform of what {received.source!r} made, {transform.__name__!r},"
        try:
            made = transform(*_arguments(received.part))
            if made is None or (isinstance(made, str) and not made.strip()):
                raise InvalidRequest(f"{where} returned nothing, so there is no input", field=NOTHING)
            return _part(made, received.part, where)
        except SegueError:
            raise
        except Exception as error:  # the function is the user's own
            raise StageFailed(f"{where} raised {type(error).__name__}: {error}") from error


def _turn_of(received: Received) -> tuple[int, bool]:
    return received.visit, received.own


def _arguments(part: Part) -> tuple[Any, ...]:
    if isinstance(part, TextPart):
        return (part.text,)
    assert part.array is not None, "models make arrays, not files"
    array = np.frombuffer(part.data, dtype=part.array.dtype).reshape(part.array.shape)
    return (array, part.array.rate) if part.kind == "audio" else (array,)


def _part(made: Any, given: Part, where: str) -> Part | list[Message]:
    """Check what a transform returned. Raises `StageFailed`."""
    makers: dict[str, Callable[[Any, str], MediaPart]] = {"audio": audio_part, "image": image_part}
    try:
        if isinstance(made, Sequence) and made and isinstance(made[0], Mapping):
            return messages_from(made, PYTHON_POLICY)
        if isinstance(given, MediaPart):
            rate = given.array.rate if given.array is not None else None
            source = (made, rate) if given.kind == "audio" and not isinstance(made, tuple) else made
            return makers[given.kind](source, "result")
    except InvalidRequest as error:
        raise StageFailed(f"{where} returned something else than it should: {error.message}") from error
    if isinstance(made, str):
        return TextPart(made)
    raise StageFailed(f"{where} returned {shown(made)}; it must return a text, a list of messages, or None")
