"""`/v1/chat/completions`: the body, as OpenAI has it with extensions, into checked `Request`s."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.media.encode import check_audio_format
from segue.media.parts import messages_from
from segue.media.sources import shown
from segue.messages.errors import InvalidRequest, NotFound, nearest
from segue.messages.request import MediaPart, Message, Request
from segue.messages.sampling import SamplingParams, check_sampling, check_token_ids, sampling_from
from segue.orchestrator.service import ModelCard
from segue.server.body import check_names, convert
from segue.server.chat_logprobs import asked_logprobs
from segue.server.errors import ModelNotFound, Unsupported
from segue.server.settings import ServerSettings

MAX_CHOICES = 16
MAX_STOPS = 16
_MAX_VOCAB = 2**31
"""Where the stage is not loaded yet."""
_TOKEN_IDS = range(_MAX_VOCAB)


class AudioOptions(msgspec.Struct):
    """How audio is to sound and to be written."""

    voice: str | None = None
    format: str | None = None


class StreamOptions(msgspec.Struct):
    """What a stream carries besides the deltas."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatBody(msgspec.Struct, kw_only=True):
    """Every parameter that does something. null means not given."""

    model: str
    messages: Any = None
    prompt_token_ids: list[int] | None = None
    """Ours, instead of messages: for checkpoints without a tokenizer."""
    modalities: list[str] | None = None
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    # ours (and vLLM's) from here on
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    stop_token_ids: list[int] | None = None
    suppress_tokens: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    sampling: dict[str, dict[str, Any]] | None = None
    return_token_ids: bool | None = None
    return_metrics: bool | None = None
    priority: int | None = None
    user: str | None = None
    """The tenant, for fair scheduling."""
    deadline: float | None = None
    """Seconds from now."""
    options: dict[str, Any] | None = None


_TO_TEXT_STAGE = tuple(
    name for name in SamplingParams.__struct_fields__ if name in ChatBody.__struct_fields__ and name != "logprobs"
)
"""Top-level parameters that are the text stage's sampling; the seed is the request's own."""
_IGNORED = frozenset(
    {"metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
     "parallel_tool_calls"}
)  # fmt: skip
"""OpenAI's parameters that change nothing about the answer here."""
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "moderation": (),
}
"""OpenAI's parameters that cannot be honoured → the values that ask for nothing (null always does)."""


@dataclass(frozen=True)
class ChatRequest:
    """A checked request: its generations and how to answer."""

    completion_id: str
    created: int
    model: str
    """As the client named it."""
    requests: list[Request]
    """One per choice; or one that makes all of them."""
    choices: int
    stream: bool
    include_usage: bool
    audio_format: str
    return_token_ids: bool
    return_metrics: bool
    wants_prompt_logprobs: bool

    @property
    def wants_logprobs(self) -> bool:
        """Of the output."""
        return any(params.logprobs is not None for params in self.requests[0].sampling.values())

    @property
    def wants_text(self) -> bool:
        return "text" in self.requests[0].modalities

    @property
    def wants_audio(self) -> bool:
        return "audio" in self.requests[0].modalities


def chat_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> ChatRequest:
    """Check everything that can be checked without the stages. Blocking (media). Raises `InvalidRequest`."""
    body = _parse(values)
    served = settings.served_names or (card.name,)
    if body.model not in served:
        raise ModelNotFound(f"model {shown(body.model)} is not served here{nearest(body.model, served)}", field="model")
    modalities = _modalities(body.modalities, card)
    voice, audio_format = _audio(body, card)
    sampling = _sampling(body, card)
    options = body.options or {}
    check_names(options, card.options, "options")
    _check_carried(options)
    choices = _choices(body)
    together = choices > 1 and card.several_texts and modalities == ["text"]
    if together:
        sampling = _together(sampling, choices, card)
    seeds = _seeds(body, 1 if together else choices)
    if body.priority is not None and abs(body.priority) > 2**31:
        raise InvalidRequest(f"priority is {body.priority}; it must be a 32-bit integer", field="priority")
    if body.deadline is not None and not 0 < body.deadline < 1e9:
        raise InvalidRequest(f"deadline is {body.deadline}; it must be seconds above 0", field="deadline")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is given, but stream is not true", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed; leave stream out", field="prompt_logprobs")
    messages = _messages(body, card, settings)

    now = time.time()
    completion_id = f"chatcmpl-{uuid.uuid4().hex}"
    requests = [
        Request(
            request_id=completion_id if len(seeds) == 1 else f"{completion_id}-{index}",
            messages=messages,
            prompt_token_ids=body.prompt_token_ids,
            modalities=modalities,
            voice=voice,
            sampling=sampling,
            seed=seed,
            priority=body.priority or 0,
            tenant=body.user or "",
            deadline=None if body.deadline is None else now + body.deadline,
            options=options,
        )
        for index, seed in enumerate(seeds)
    ]
    return ChatRequest(
        completion_id=completion_id,
        created=int(now),
        model=body.model,
        requests=requests,
        choices=choices,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        audio_format=audio_format,
        return_token_ids=bool(body.return_token_ids),
        return_metrics=bool(body.return_metrics),
        wants_prompt_logprobs=body.prompt_logprobs is not None,
    )


def _check_carried(options: dict[str, Any]) -> None:
    """Options travel to the stages in msgpack, whose integers have 64 bits."""
    try:
        msgspec.msgpack.encode(options)
    except (OverflowError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else "has a number that is too large"
        raise InvalidRequest(f"options {what}: {shown(options)}", field="options") from error


def _parse(values: dict[str, Any]) -> ChatBody:
    check_names(values, {*ChatBody.__struct_fields__, *_IGNORED, *_UNSUPPORTED})
    for name, harmless in _UNSUPPORTED.items():
        value = values.get(name)
        # True == 1 in Python: compare types as well
        if value is not None and not any(value == given and type(value) is type(given) for given in harmless):
            right = f"leave it out or use {' or '.join(map(repr, harmless))}" if harmless else "leave it out"
            raise Unsupported(f"{name} is {shown(value)}; this server does not support that: {right}", field=name)
    for name in ("audio", "stream_options"):
        if isinstance(values.get(name), dict):
            kind = AudioOptions if name == "audio" else StreamOptions
            check_names(values[name], kind.__struct_fields__, name)
    return convert(values, ChatBody)


def _modalities(wanted: list[str] | None, card: ModelCard) -> list[str]:
    if wanted is None:
        return ["text"] if "text" in card.gives else sorted(card.gives)
    for index, name in enumerate(wanted):
        if name not in card.gives:
            gives = ", ".join(sorted(card.gives))
            raise InvalidRequest(
                f"modalities[{index}] is {shown(name)}; this model gives: {gives}", field=f"modalities[{index}]"
            )
    if not wanted:
        raise InvalidRequest("modalities is empty; name at least one, or leave it out for text", field="modalities")
    return list(dict.fromkeys(wanted))


def _audio(body: ChatBody, card: ModelCard) -> tuple[str | None, str]:
    """Voice and format. Streams are raw PCM unless asked otherwise: every piece can be played as it comes."""
    audio = body.audio or AudioOptions()
    if audio.voice is not None and audio.voice not in card.voices:
        hint = nearest(audio.voice, card.voices) if card.voices else ": this model has no voices"
        raise NotFound(f"audio.voice is {shown(audio.voice)}, which is not known{hint}", field="audio.voice")
    if audio.format is None:
        return audio.voice, "pcm16" if body.stream else "wav"
    return audio.voice, check_audio_format(audio.format, "audio.format")


def _sampling(body: ChatBody, card: ModelCard) -> dict[str, SamplingParams]:
    by_stage: dict[str, SamplingParams] = {}
    for stage, values in (body.sampling or {}).items():
        if stage not in card.sampling_stages:
            hint = nearest(stage, card.sampling_stages)
            raise InvalidRequest(f"sampling names {shown(stage)}, no stage that samples{hint}", field="sampling")
        by_stage[stage] = sampling_from(values, f"sampling.{stage}")
        if by_stage[stage].n is not None:
            raise InvalidRequest(
                f"sampling.{stage}.n is {by_stage[stage].n}; give n at the top of the request",
                field=f"sampling.{stage}.n",
            )
        check_token_ids(by_stage[stage], card.vocab_sizes.get(stage, _MAX_VOCAB), f"sampling.{stage}.")
    top = _top_level(body, card)
    if top is None:
        return by_stage
    if card.text_stage is None:
        given = next(name for name in SamplingParams.__struct_fields__ if getattr(top, name) is not None)
        raise InvalidRequest(f"{given} is given, but this model has no stage that makes text", field=given)
    # what is said of the stage by name is the more special
    by_stage[card.text_stage] = by_stage.get(card.text_stage, SamplingParams()).over(top)
    return by_stage


_PREFIX = "request"


def _top_level(body: ChatBody, card: ModelCard) -> SamplingParams | None:
    """The text stage's parameters as they stand at the top of the body; None where there are none."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _TO_TEXT_STAGE if getattr(body, name) is not None}
    given.pop("seed", None)
    given.pop("n", None)  # as many requests, or set where one makes all
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise InvalidRequest(
                f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; give one",
                field="max_completion_tokens",
            )
        if body.max_completion_tokens < 1:
            raise InvalidRequest(
                f"max_completion_tokens is {body.max_completion_tokens}; it must be at least 1",
                field="max_completion_tokens",
            )
        given["max_tokens"] = body.max_completion_tokens
    for token in body.logit_bias or {}:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise InvalidRequest(f"logit_bias has {shown(token)}, which is no token id", field="logit_bias")
    if (logprobs := asked_logprobs(body.logprobs, body.top_logprobs)) is not None:
        given["logprobs"] = logprobs
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    elif body.stop is not None and len(body.stop) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(body.stop)} strings; at most {MAX_STOPS} are taken", field="stop")
    if not given:
        return None
    params = _checked_at_top(given)
    check_token_ids(params, card.vocab_sizes.get(card.text_stage or "", _MAX_VOCAB), "")
    return params


def _checked_at_top(given: SamplingParams | dict[str, Any]) -> SamplingParams:
    """Parameters that stand at the top of the body, under no name."""
    try:
        if isinstance(given, dict):
            return sampling_from(given, _PREFIX)
        check_sampling(given, _PREFIX)
        return given
    except InvalidRequest as error:
        field = (error.field or "").removeprefix(f"{_PREFIX}.")
        raise type(error)(error.message.removeprefix(f"{_PREFIX}."), field=field) from error


def _choices(body: ChatBody) -> int:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n is {n}; it must be from 1 to {MAX_CHOICES}", field="n")
    return n


def _together(sampling: dict[str, SamplingParams], n: int, card: ModelCard) -> dict[str, SamplingParams]:
    """One request that makes all choices: its prompt is computed once. Draws are those of `n` requests with their own
    seeds."""
    assert card.text_stage is not None
    several = SamplingParams(n=n).over(sampling.get(card.text_stage, SamplingParams()))
    _checked_at_top(several)
    return {**sampling, card.text_stage: several}


def _seeds(body: ChatBody, n: int) -> list[int | None]:
    """One per request: the given seed and its successors (wrapping at 64 bits), or None: given at admission."""
    if body.seed is None:
        return [None] * n
    if not -(2**63) <= body.seed < 2**64:
        raise InvalidRequest(f"seed is {body.seed}; it must be a 64-bit integer", field="seed")
    return [seed if (seed := body.seed + index) < 2**64 else seed - 2**64 for index in range(n)]


def _messages(body: ChatBody, card: ModelCard, settings: ServerSettings) -> list[Message]:
    if body.prompt_token_ids is not None:
        if body.messages is not None:
            raise InvalidRequest("messages and prompt_token_ids are given; give one", field="prompt_token_ids")
        if not body.prompt_token_ids or any(token not in _TOKEN_IDS for token in body.prompt_token_ids):
            right = "it must be a list of token ids, at least one"
            raise InvalidRequest(
                f"prompt_token_ids is {shown(body.prompt_token_ids)}; {right}", field="prompt_token_ids"
            )
        return []
    if body.messages is None:
        raise InvalidRequest("messages is missing", field="messages")
    messages = messages_from(body.messages, settings.media)
    _check_kinds(messages, card)
    return messages


def _check_kinds(messages: list[Message], card: ModelCard) -> None:
    for message in messages:
        for part in message.content:
            if isinstance(part, MediaPart) and part.kind not in card.takes:
                takes = ", ".join(sorted(card.takes))
                raise InvalidRequest(
                    f"{part.field} is of kind {part.kind}; this model takes: {takes}", field=part.field
                )
