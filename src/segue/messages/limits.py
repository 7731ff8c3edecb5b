"""Bounds on the contents of one request, checked before any work on it: a long list costs every other client.

Each list parameter has a bound in `_COUNTED` or is a special case of `check_lists`; a deployment changes the bounds
under `limits`. `check_carried` checks that a client's free-form values can be encoded for the wire.

Optional reading: checks of what a request carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, TooLarge


def check_carried(value: object, field: str) -> None:
    """Raise `InvalidRequest` for a value that msgpack cannot carry to the stages: it has 64-bit integers and UTF-8
    text."""
    try:
        msgspec.msgpack.encode(value)
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from error
    except OverflowError as error:
        raise InvalidRequest(f"{field} has a number that is too large: integers have 64 bits", field=field) from error
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} holds half of a surrogate pair: not valid text", field=field) from error


_NAMED = ("logit_bias", "allowed_token_ids", "stop_token_ids", "suppress_tokens", "logprob_token_ids")
_SIDES = ("documents", "queries", "items", "text_1", "text_2", "data_1", "data_2", "prompt_embeds")

_PARTS = ("content", "output", "tool_calls")
"""Fields of a message, or of an item of a response, that hold parts."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one request. Above a number of bytes the status is 413, above any other bound 400."""

    max_json_values: int = 1_000_000
    """Values in a JSON body: entries of lists and members of objects, on all levels."""
    max_json_depth: int = 128
    """Nesting depth of lists and objects in a JSON body."""
    max_messages: int = 4096
    """Messages of a conversation, or items of `/v1/responses`."""
    max_parts: int = 4096
    """Content parts and tool calls of all messages together."""
    max_media_parts: int = 64
    """Images, recordings and videos of one request."""
    max_tools: int = 512
    max_prompts: int = 2048
    """Prompts of one completion; texts of one request for embeddings, classes or scores."""
    max_choices: int = 4096
    """Answers to one request: prompts × `n`."""
    max_stop_strings: int = 16
    """Entries of `stop`, for each stage."""
    max_stop_bytes: int = 4096
    """Bytes of all entries of `stop` together: each token of an output is compared with them."""
    max_bad_words: int = 1024
    max_bad_word_bytes: int = 65536
    """Bytes of all `bad_words` together: the stage tokenizes them."""
    max_token_ids: int = 65536
    """Entries of each parameter that names tokens: `logit_bias`, `allowed_token_ids`, `stop_token_ids`,
    `suppress_tokens`, `logprob_token_ids`."""
    max_structured_choices: int = 4096
    """Entries of `choice` of `structured_outputs`."""
    max_appends: int = 4096
    """Pieces appended to one open request."""
    max_appended_bytes: int = 4 * 1024 * 1024
    """Bytes of all that is appended to one open request: of text, and 4 for each token id."""


DEFAULTS = RequestLimits()
"""Limits that apply if no deployment is known."""

_COUNTED = {
    "messages": "max_messages",
    "tools": "max_tools",
    "stop": "max_stop_strings",
    "stop_sequences": "max_stop_strings",
    "bad_words": "max_bad_words",
    "image": "max_media_parts",
    "guided_choice": "max_structured_choices",
    **dict.fromkeys(_NAMED, "max_token_ids"),
    **dict.fromkeys(_SIDES, "max_prompts"),
}
"""Parameter → the limit on its number of entries."""
_WEIGHED = {"stop": "max_stop_bytes", "stop_sequences": "max_stop_bytes", "bad_words": "max_bad_word_bytes"}
"""Parameter → the limit on the bytes of its texts."""


def check_count(field: str, count: int, limits: RequestLimits, name: str, what: str = "entries") -> None:
    """Raise `InvalidRequest` if `count` exceeds the limit called `name`."""
    if count > (most := getattr(limits, name)):
        raise InvalidRequest(f"{field} has {count} {what}; at most {most} are taken (limits.{name})", field=field)


def check_lists(values: Mapping[str, Any], limits: RequestLimits, at: str = "") -> None:
    """Raise `InvalidRequest`, or `TooLarge` for bytes, for a parameter with more entries than `limits` allow.

    `values`: parameters by name, of any type (types are checked later); `at`: prefix of their names in messages.
    """
    for name, value in values.items():
        if name in _COUNTED and isinstance(value, list | tuple | dict):
            check_count(at + name, len(value), limits, _COUNTED[name])
        if name in _WEIGHED and value:
            _check_bytes(at + name, value, limits, _WEIGHED[name])
    for name in ("prompt", "input"):
        _check_texts(at + name, values.get(name), limits)
    for name in ("messages", "input"):
        _check_parts(name, values.get(name), limits)
    form = values.get("structured_outputs")
    if isinstance(form, dict) and isinstance(choice := form.get("choice"), list):
        check_count(f"{at}structured_outputs.choice", len(choice), limits, "max_structured_choices")
    stages = values.get("sampling")
    if isinstance(stages, dict):
        for stage, inner in stages.items():
            if isinstance(inner, dict):
                check_lists(inner, limits, f"sampling.{stage}.")


def _check_bytes(field: str, value: Any, limits: RequestLimits, name: str) -> None:
    texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    size = sum(len(text.encode(errors="surrogatepass")) for text in texts if isinstance(text, str))
    if size > (most := getattr(limits, name)):
        raise TooLarge(f"{field} has {size} bytes; at most {most} are taken (limits.{name})", field=field)


def _check_texts(field: str, value: Any, limits: RequestLimits) -> None:
    """Bound the number of texts: a list of numbers is one text (its token ids), a list of objects a conversation."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        check_count(field, len(value), limits, "max_messages" if isinstance(value[0], dict) else "max_prompts")


def _check_parts(field: str, messages: Any, limits: RequestLimits) -> None:
    """Bound the number of content parts of messages, or of the items of a response."""
    if isinstance(messages, list):
        lists = (message.get(name) for message in messages if isinstance(message, dict) for name in _PARTS)
        count = sum(len(parts) for parts in lists if isinstance(parts, list))
        check_count(field, count, limits, "max_parts", "content parts")
