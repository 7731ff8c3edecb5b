"""Types and checks of the parameters that all text-generating endpoints share."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from segue.messages.errors import InvalidRequest, SegueError, nearest, shown, wrong
from segue.messages.limits import check_carried
from segue.messages.request import check_priority
from segue.messages.sampling import SamplingParams
from segue.orchestrator.service import ModelCard
from segue.orchestrator.tokenless import refusal
from segue.server.generation.format import GUIDED
from segue.server.http.body import check_names, check_unsupported, convert
from segue.server.http.errors import ModelNotFound, Unsupported
from segue.server.settings import ServerSettings
from segue.server.vllm.parameters import checked_id, checked_salt

MAX_VOCAB = 2**31
"""Fallback for a stage that is not loaded yet."""


class StreamOptions(msgspec.Struct):
    """Additional contents of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: every event has the usage so far, unless `include_usage` is false."""


class CommonBody(msgspec.Struct, kw_only=True):
    """Every shared parameter that has an effect. null means not given."""

    model: str = ""
    """Default: the served model."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # additional (and vLLM's)
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    use_beam_search: bool | None = None
    """vLLM's: a beam search with `best_of` beams, else `n`."""
    length_penalty: float | None = None
    early_stopping: bool | None = None
    stop_token_ids: list[int] | None = None
    suppress_tokens: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    sampling: dict[str, dict[str, Any]] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_metrics: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    """The tenant for fair scheduling, if clients have no keys; and the session, if no other is given."""
    prompt_cache_key: str | None = None
    """OpenAI's: the session."""
    session_id: str | None = None
    """vLLM's: the session."""
    deadline: float | None = None
    """Seconds from now."""
    options: dict[str, Any] | None = None


MAX_USER = 256
"""Most characters of `user` and of the name of a session: the server keeps them and sends them with every request."""
IGNORED = frozenset(
    {
        "metadata",
        "safety_identifier",
        "prompt_cache_retention",
        "prompt_cache_options",
    }
)
"""Parameters of OpenAI's and vLLM's that are accepted and ignored."""
B = TypeVar("B", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How to answer a checked request, as far as all endpoints share it."""

    completion_id: str
    """Contains the client's `request_id`, if any; unique even if two requests have the same one."""
    created: int
    model: str
    """The model's name as the client wrote it."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    """Log-probabilities name tokens as `token_id:5`."""
    return_metrics: bool
    wants_prompt_logprobs: bool
    written: Mapping[str, str]
    """Sampling parameters by stage (`sampling.llm.top_k`) → the client's name (`top_k`)."""


def answering_fields(
    body: CommonBody, card: ModelCard, prefix: str, now: float, named: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The fields of `Answering`, with a new id. `named`: sampling parameters → the endpoint's names."""
    streamed = body.stream_options or StreamOptions()
    asked_for_usage = bool(streamed.continuous_usage_stats)
    include_usage = asked_for_usage if streamed.include_usage is None else streamed.include_usage
    return {
        "completion_id": new_id(prefix) if (own := checked_id(body.request_id)) is None else f"{prefix}-{own}",
        "created": int(now),
        "model": body.model,
        "stream": bool(body.stream),
        "include_usage": include_usage,
        "continuous_usage": include_usage and asked_for_usage,
        "return_token_ids": bool(body.return_token_ids),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "return_metrics": bool(body.return_metrics),
        "wants_prompt_logprobs": body.prompt_logprobs is not None,
        "written": _written(body, card.text_stage, named or {}),
    }


def check_without_tokenizer(body: CommonBody, card: ModelCard, *, text: bool, logprobs: bool) -> None:
    """Raise `InvalidRequest` for an answer with text from a deployment that loads no tokenizer. `text`, `logprobs`:
    the client wants text, log-probabilities of it."""
    if card.tokenizer or not text:
        return
    if not body.return_token_ids:
        raise refusal("return_token_ids", "is not true, but the answer has no text", "set it to true")
    if logprobs and not body.return_tokens_as_token_ids:
        right = "set return_tokens_as_token_ids to true"
        raise refusal("logprobs", "name tokens by their text", right)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def names_at_top(body: CommonBody, named: Mapping[str, str]) -> dict[str, str]:
    """Sampling parameters of the text stage → the client's names at the top of the body; the most specific names first.
    `named`: parameters for which the endpoint has its own form."""
    names = dict(named)
    for form, of_form in GUIDED.items():
        if getattr(body, form) is not None:
            names |= {f"structured_outputs.{of_form}": form, "structured_outputs": form}
    if body.response_format is not None and body.response_format.get("type") != "text":  # text requests no form
        names |= {
            "structured_outputs.json": "response_format.json_schema.schema",
            "structured_outputs.json_object": "response_format",
            "structured_outputs.structural_tag": "response_format",
            "structured_outputs": "response_format",
        }
    if body.beam_width is None and body.use_beam_search:
        names["beam_width"] = "use_beam_search"
    same = (name for name in body.__struct_fields__ if name in SamplingParams.__struct_fields__)
    return {**names, **{name: name for name in same if name not in names}}


def _written(body: CommonBody, stage: str | None, named: Mapping[str, str]) -> dict[str, str]:
    """The top-level parameters that apply to the text stage."""
    own = (body.sampling or {}).get(stage or "", {})
    return {
        f"sampling.{stage}.{name}": said
        for name, said in names_at_top(body, named).items()
        if own.get(name.partition(".")[0]) is None
    }


def named_as(field: str, written: Mapping[str, str]) -> str:
    """The client's name of a field. `written`: as in `Answering`."""
    path = _path_of(field, written)
    return field if path is None else written[path] + field.removeprefix(path)


def _path_of(field: str, written: Mapping[str, str]) -> str | None:
    """The first entry of `written` that is the field or contains it."""
    return next((path for path in written if field == path or field.startswith((f"{path}.", f"{path}["))), None)


def as_written(error: SegueError, written: Mapping[str, str]) -> SegueError:
    """A stage's error, with the client's names. `written`: as in `Answering`."""
    field = error.field or ""
    path = _path_of(field, written)
    if path is None:
        return error
    message = re.sub(rf"(?<!\w){re.escape(path)}(?!\w)", written[path], error.message)
    renamed = type(error)(message, field=named_as(field, written), stage=error.stage)
    renamed.__cause__ = error
    return renamed


def parse_body(
    values: dict[str, Any],
    kind: type[B],
    unsupported: Mapping[str, tuple[object, ...]],
    nested: Mapping[str, type[msgspec.Struct]],
) -> B:
    """The typed body. `unsupported`: parameters → values that have no effect (null always does); `nested`: parameters
    that are objects → their type. Raises `InvalidRequest`."""
    # suggest no name that would be refused or ignored
    check_names(values, {*kind.__struct_fields__, *IGNORED, *unsupported}, offered=kind.__struct_fields__)
    check_unsupported(values, unsupported)
    for name, inner in nested.items():
        if isinstance(values.get(name), dict):
            check_names(values[name], inner.__struct_fields__, name)
    return convert(values, kind)


def with_model(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> dict[str, Any]:
    """The body with a model name: the served one if it names none (vLLM's clients may omit it)."""
    return values if values.get("model") not in (None, "") else {**values, "model": served_names(card, settings)[0]}


def served_names(card: ModelCard, settings: ServerSettings) -> tuple[str, ...]:
    """The names that clients may use for the model, without LoRA adapters; at least one."""
    return settings.served_names or (card.name,)


def check_model(model: str, card: ModelCard, settings: ServerSettings) -> None:
    """Raise `ModelNotFound` unless the name is that of the model or of a LoRA adapter."""
    served = (*served_names(card, settings), *card.adapters)
    if model not in served:
        raise ModelNotFound(f"model {shown(model)} is not served here{nearest(model, served)}", field="model")


def common_fields(body: CommonBody, card: ModelCard, now: float) -> dict[str, Any]:
    """The fields of `Request` that every endpoint fills in the same way. Raises `InvalidRequest`."""
    options = body.options or {}
    check_names(options, card.options, "options")
    check_carried(options, "options")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given, but stream is not true", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed; leave stream out", field="prompt_logprobs")
    if body.spaces_between_special_tokens is False and body.skip_special_tokens is False:
        raise Unsupported(
            "spaces_between_special_tokens is False, but skip_special_tokens keeps special tokens in the text, "
            "written as the tokenizer writes them: leave it out or use True",
            field="spaces_between_special_tokens",
        )
    if body.detokenize is False and not body.return_token_ids:
        raise InvalidRequest(
            "detokenize is False, so the answer has no text; ask for its ids with return_token_ids, or leave it out",
            field="detokenize",
        )
    return {
        "options": options,
        "adapter": body.model if body.model in card.adapters else None,
        "cache_salt": checked_salt(body.cache_salt),
        **turn_fields(body.priority, body.user, body.deadline, now, card),
        "session": _session(body),
    }


def _session(body: CommonBody) -> str:
    """The session of a request, for routing. Raises `InvalidRequest`."""
    for field in ("session_id", "prompt_cache_key"):
        name = getattr(body, field)
        if name is not None and len(name) > MAX_USER:
            raise InvalidRequest(f"{field} has {len(name)} characters; at most {MAX_USER} are taken", field=field)
    return body.session_id or body.prompt_cache_key or body.user or ""


def turn_fields(
    priority: int | None, user: str | None, deadline: float | None, now: float, card: ModelCard
) -> dict[str, Any]:
    """The scheduling fields of `Request`. `deadline`: seconds after `now`. Raises `InvalidRequest`."""
    if priority is not None and not -(2**31) <= priority < 2**31:
        raise wrong("priority", priority, "a 32-bit integer")
    check_priority(priority or 0, card.by_priority)
    if user is not None and len(user) > MAX_USER:
        raise InvalidRequest(f"user has {len(user)} characters; at most {MAX_USER} are taken", field="user")
    if deadline is not None and not 0 < deadline < 1e9:
        raise wrong("deadline", deadline, "seconds above 0")
    return {
        "priority": priority or 0,
        "tenant": user or "",
        "deadline": None if deadline is None else now + deadline,
    }


def checked_token_ids(ids: list[int], field: str, vocab_size: int | None = None) -> list[int]:
    """Check token ids that a client sent as a prompt. Raises `InvalidRequest`."""
    end = MAX_VOCAB if vocab_size is None else vocab_size
    if not ids or any(not 0 <= token < end for token in ids):
        right = "it must be a list of token ids, at least one" + (f", from 0 to {end - 1}" if vocab_size else "")
        raise InvalidRequest(f"{field} is {shown(ids)}; {right}", field=field)
    return ids
