"""Converts the body of `/v1/chat/completions` (OpenAI's, with extensions) into checked `Request`s.

Also builds log-probability objects: OpenAI's for the output, vLLM's for the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from segue.media.parts import messages_from, messages_schema, multi_modal_parts
from segue.messages.deltas import TokenLogprobs, TopToken
from segue.messages.diffusion import PARAMETERS, DiffusionParams, diffusion_from
from segue.messages.errors import InvalidRequest, NotFound, SegueError, nearest, shown, wrong
from segue.messages.formats import Format, check_audio_format
from segue.messages.limits import check_lists
from segue.messages.request import MULTI_MODAL_DATA, MediaPart, Message, Request
from segue.models.shared.dialects.dialect import Dialect
from segue.orchestrator.service import ModelCard
from segue.orchestrator.tokenless import refusal
from segue.server.generation.parameters import (
    Answering,
    CommonBody,
    StreamOptions,
    answering_fields,
    as_written,
    check_model,
    check_without_tokenizer,
    checked_token_ids,
    common_fields,
    named_as,
    new_id,
    parse_body,
    with_model,
)
from segue.server.generation.sampling import choices_of, sampling_of, seeds_of, together
from segue.server.http.errors import Unsupported
from segue.server.openai.chat.template import begins_in_thought, chat_options, dialect_for
from segue.server.openai.chat.tools import NamedTool, Tool, ToolPlan, tool_plan
from segue.server.settings import ServerSettings
from segue.server.vllm.omni import sampling_by_stage, unwrapped, with_processor_options
from segue.server.vllm.parameters import VLLM_UNSUPPORTED


def asked_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """`SamplingParams.logprobs` from OpenAI's two parameters; the stage checks the maximum. Raises `InvalidRequest`."""
    if top_logprobs is not None and top_logprobs < -1:
        raise wrong("top_logprobs", top_logprobs, "at least 0, or -1 for all tokens")
    if top_logprobs and not logprobs:
        raise InvalidRequest(f"top_logprobs is {top_logprobs}, but logprobs is not true", field="top_logprobs")
    return (top_logprobs or 0) if logprobs else None


def token_name(token: TopToken, *, as_id: bool) -> str:
    """The name of a token: its text, or its id in vLLM's form, because texts are ambiguous."""
    return f"token_id:{token.token_id}" if as_id else token.text


def logprobs_object(tokens: Iterable[TokenLogprobs], *, as_ids: bool) -> dict[str, Any]:
    """The `logprobs` of a choice."""
    content = [
        {**_token(one.chosen, as_ids), "top_logprobs": [_token(top, as_ids) for top in one.top]} for one in tokens
    ]
    return {"content": content, "refusal": None}


def _token(token: TopToken, as_id: bool) -> dict[str, Any]:
    # tokens without text have no bytes either
    return {"token": token_name(token, as_id=as_id), "logprob": token.logprob, "bytes": list(token.data) or None}


def prompt_logprobs_object(tokens: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` of an answer: per position, token id → its log-probability there."""
    return [
        None
        if one is None
        else {
            str(token.token_id): {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text}
            for token in (one.chosen, *one.top)
        }
        for one in tokens
    ]


Messages = Annotated[Any, msgspec.Meta(extra_json_schema=messages_schema())]
"""Raw message objects; `messages_from` checks them."""


MultiModalData = dict[str, str | list[str]] | None
"""Media of a prompt: kind → a URL, or a list of URLs."""


class AudioOptions(msgspec.Struct):
    """Voice and format of the audio."""

    voice: str | None = None
    format: str | None = None


class ChatBody(CommonBody, kw_only=True):
    """Every parameter that has an effect. null means not given."""

    messages: Messages = None
    prompt_token_ids: list[int] | None = None
    """Token ids instead of messages."""
    multi_modal_data: MultiModalData = None
    """Media for the placeholders of `prompt_token_ids`."""
    modalities: list[str] | None = None
    audio: AudioOptions | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    store: bool | None = None
    """Keep the completion, so that another can go on from it."""
    # additional (and vLLM's)
    previous_response_id: str | None = None
    """The id of a stored completion that this one goes on from, in place of the messages up to its reply."""
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    # vllm-omni's
    mm_processor_kwargs: dict[str, Any] | None = None
    """Processor arguments by the names of `options`."""
    sampling_params_list: list[dict[str, Any] | None] | None = None
    """`sampling` as a list with an entry per stage."""


_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "moderation": (),
    "echo": (False,),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "media_io_kwargs": ({},),
    **VLLM_UNSUPPORTED,
}
"""Unsupported parameters of OpenAI's and vLLM's → values that have no effect (null always does)."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest(Answering):
    """A checked request: its generations, and how to answer it."""

    requests: list[Request]
    """One per choice, or one that makes all choices."""
    choices: int
    audio_format: str
    dialect: Dialect
    tools: ToolPlan
    in_thought: bool
    """Whether the prompt ends inside a thought."""
    include_reasoning: bool

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client wants log-probabilities of the output."""
        sampling = self.requests[0].sampling.values()
        return any(params.logprobs is not None or params.logprob_token_ids for params in sampling)

    @property
    def wants_text(self) -> bool:
        return "text" in self.requests[0].modalities

    @property
    def wants_audio(self) -> bool:
        return "audio" in self.requests[0].modalities


def chat_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> ChatRequest:
    """Check everything that needs no stage. Blocking (media). Raises `InvalidRequest`."""
    values = unwrapped(values, card)
    # limits apply to the converted body too, which may have more entries than the client's own lists
    check_lists(values, settings.limits)
    values, diffusion = _parted(with_model(values, card, settings), card)
    body = parse_body(values, ChatBody, _UNSUPPORTED, {"audio": AudioOptions, "stream_options": StreamOptions})
    body.options = with_processor_options(body.options, body.mm_processor_kwargs, card)
    of_stages: dict[str, str] = {}
    if body.sampling_params_list is not None:
        if body.sampling is not None:
            raise InvalidRequest(
                "sampling_params_list and sampling are given, but mean the same; give one", field="sampling"
            )
        body.sampling, of_stages = sampling_by_stage(body.sampling_params_list, card)
    check_model(body.model, card, settings)
    dialect = dialect_for(card, settings)
    now = time.time()
    common = common_fields(body, card, now)
    modalities = _modalities(body.modalities, card, streamed=bool(body.stream))
    voice, audio_format = _audio(body, card)
    tools = tool_plan(body.tools, body.tool_choice, body.parallel_tool_calls, values.get("tools"), dialect)
    if body.detokenize is False and body.tools:
        raise InvalidRequest(
            "detokenize is False, but calls are parsed from the text: leave out one of detokenize and tools",
            field="detokenize",
        )
    if body.messages is not None and not card.tokenizer:
        raise refusal("messages", "are text", "send prompt_token_ids")
    check_without_tokenizer(
        body, card, text="text" in modalities, logprobs=bool(body.logprobs or body.logprob_token_ids)
    )
    if body.tools and not card.tokenizer:
        raise refusal("tools", "are given, but calls are parsed from text", "leave them out")
    named = _named(body, tools)
    sampling = sampling_of(
        body,
        card,
        named,
        max_tokens=_max_tokens(body),
        logprobs=asked_logprobs(body.logprobs, body.top_logprobs),
        structured_outputs=tools.structured,
        skip_special_tokens=False if tools.keeps_special_tokens and body.skip_special_tokens is None else None,
    )
    together_possible = card.several_texts and modalities == ["text"]
    choices = choices_of(body, together=together_possible)
    as_one = choices > 1 and together_possible
    if as_one:
        sampling = together(sampling, choices, card)
    seeds = seeds_of(body, 1 if as_one else choices)
    if body.store and choices > 1:
        raise wrong("n", choices, "1 if store is true: others go on from one reply")
    messages = _messages(body, card, settings)
    options = chat_options(body, dialect, tools)

    answering = answering_fields(body, card, "chatcmpl", now, named)
    answering["written"] |= {**of_stages, "previous": "previous_response_id", "keep": "store"}
    if body.prompt_token_ids is not None:  # stages after the tokenizer cannot tell ids from messages
        answering["written"]["messages"] = "prompt_token_ids"
    request_id = new_id("chatcmpl")
    formats = {
        "audio": Format(name=audio_format, whole=not body.stream, base64=True),  # whole, it states its length
        "image": Format(name="png", base64=True),
        "video": Format(name="mp4", fragmented=True, base64=True),
    }
    requests = [
        Request(
            request_id=request_id if len(seeds) == 1 else f"{request_id}-{index}",
            messages=messages,
            chat=options,
            prompt_token_ids=body.prompt_token_ids,
            add_special_tokens=body.add_special_tokens,
            modalities=modalities,
            formats={name: form for name, form in formats.items() if name in modalities},
            voice=voice,
            sampling=sampling,
            diffusion=diffusion,
            seed=seed,
            return_prompt_ids=answering["return_token_ids"] or answering["continuous_usage"],
            keep=answering["completion_id"] if body.store else "",
            previous=body.previous_response_id,
            **common,
        )
        for index, seed in enumerate(seeds)
    ]
    return ChatRequest(
        **answering,
        requests=requests,
        choices=choices,
        audio_format=audio_format,
        dialect=dialect,
        tools=tools,
        in_thought=body.prompt_token_ids is None and begins_in_thought(messages, options, dialect),
        include_reasoning=body.include_reasoning is not False,
    )


def as_chat(
    own_id: str,
    values: dict[str, Any],
    places: Mapping[str, str],
    named: Mapping[str, str],
    card: ModelCard,
    settings: ServerSettings,
) -> ChatRequest:
    """Convert a request of another API to a chat completion of one choice. `places`, `named`: path or name in `values`
    → the client's. Blocking (media). Raises `InvalidRequest` with the client's names."""
    written = {**places, **named}
    try:
        chat = chat_request({name: value for name, value in values.items() if value is not None}, card, settings)
    except SegueError as error:
        raise as_written(error, written) from error
    requests = [msgspec.structs.replace(request, request_id=own_id) for request in chat.requests]
    of_stages = {path: named_as(said, named) for path, said in chat.written.items()}
    return replace(chat, completion_id=own_id, requests=requests, written={**of_stages, **written})


def _named(body: ChatBody, tools: ToolPlan) -> dict[str, str]:
    """Sampling parameters that the body has in another form → their names there."""
    named = {"logprobs": "logprobs" if body.top_logprobs is None else "top_logprobs"}
    if body.max_completion_tokens is not None:
        named["max_tokens"] = "max_completion_tokens"
    if tools.structured is not None:
        named |= {"structured_outputs.json": tools.schema_at, "structured_outputs": "tool_choice"}
    return named


def _parted(values: dict[str, Any], card: ModelCard) -> tuple[dict[str, Any], DiffusionParams | None]:
    """The body, and the image parameters (by diffusers' names) of a model that makes images."""
    if card.gives.isdisjoint(("image", "video")):
        return values, None
    of_images = {name: value for name, value in values.items() if name in PARAMETERS}
    for name in ("partial_images", "progress"):
        if of_images.get(name):
            raise Unsupported(
                f"{name} is {shown(of_images[name])}; a chat completion has no previews: use /v1/images/generations",
                field=name,
            )
    rest = {name: value for name, value in values.items() if name not in of_images}
    return rest, diffusion_from(of_images) if of_images else None


def _max_tokens(body: ChatBody) -> int | None:
    """The token limit, from OpenAI's newer or older name."""
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; give one",
            field="max_completion_tokens",
        )
    if body.max_completion_tokens < 1:
        raise wrong("max_completion_tokens", body.max_completion_tokens, "at least 1")
    return body.max_completion_tokens


def _modalities(wanted: list[str] | None, card: ModelCard, *, streamed: bool) -> list[str]:
    if wanted is None:
        others = card.gives - {"video"} or card.gives
        wanted = ["text"] if "text" in card.gives else sorted(others)
    texts = {name for name in card.own_outputs if name.endswith(".text")}
    for index, name in enumerate(wanted):
        if name not in card.gives and name not in texts:
            gives = ", ".join([*sorted(card.gives), *sorted(texts)])
            raise InvalidRequest(
                f"modalities[{index}] is {shown(name)}; this model gives: {gives}", field=f"modalities[{index}]"
            )
    if not wanted:
        raise InvalidRequest("modalities is empty; name at least one, or leave it out for text", field="modalities")
    if card.gives.isdisjoint(wanted):
        gives = ", ".join(sorted(card.gives))
        raise InvalidRequest(f"modalities is {shown(wanted)}; it must have one of {gives}, too", field="modalities")
    if "video" in wanted and not streamed:
        raise Unsupported(
            "a chat completion returns video only with stream: true, while it is made; for a whole file use POST "
            "/v1/videos",
            field="modalities",
        )
    return list(dict.fromkeys(wanted))


def _audio(body: ChatBody, card: ModelCard) -> tuple[str | None, str]:
    """Voice and format. The default format of a stream is raw PCM: every piece can be played as it comes."""
    audio = body.audio or AudioOptions()
    # while the model is loading, its voices are not known yet: then the input stage checks
    if audio.voice is not None and card.voices is not None and audio.voice not in card.voices:
        hint = nearest(audio.voice, card.voices) if card.voices else ": this model has no voices"
        raise NotFound(f"audio.voice is {shown(audio.voice)}, which is not known{hint}", field="audio.voice")
    if audio.format is None:
        return audio.voice, "pcm16" if body.stream else "wav"
    return audio.voice, check_audio_format(audio.format, "audio.format")


def _messages(body: ChatBody, card: ModelCard, settings: ServerSettings) -> list[Message]:
    if body.prompt_token_ids is not None:
        if body.messages is not None:
            raise InvalidRequest("messages and prompt_token_ids are given; give one", field="prompt_token_ids")
        checked_token_ids(body.prompt_token_ids, "prompt_token_ids")
        return multi_modal_messages(body.multi_modal_data, card, settings)
    if body.multi_modal_data:
        raise InvalidRequest(
            f"{MULTI_MODAL_DATA} is given without prompt_token_ids; in messages, media are parts of the content",
            field=MULTI_MODAL_DATA,
        )
    if body.messages is None:
        raise InvalidRequest("messages is missing", field="messages")
    return checked_messages(body.messages, card, settings)


def checked_messages(messages: Any, card: ModelCard, settings: ServerSettings) -> list[Message]:
    """Messages with only media that the model takes. Blocking (media). Raises `InvalidRequest`."""
    checked = messages_from(messages, settings.media)
    _check_kinds(checked, card)
    return checked


def multi_modal_messages(data: MultiModalData, card: ModelCard, settings: ServerSettings) -> list[Message]:
    """The media of a prompt as a message, if there are any. Blocking (media). Raises `InvalidRequest`."""
    parts = multi_modal_parts(data, settings.media) if data else []
    messages = [Message("user", [*parts])] if parts else []
    _check_kinds(messages, card)
    return messages


def _check_kinds(messages: list[Message], card: ModelCard) -> None:
    for message in messages:
        for part in message.content:
            if isinstance(part, MediaPart) and part.kind not in card.takes:
                takes = ", ".join(sorted(card.takes))
                raise InvalidRequest(
                    f"{part.field} is of kind {shown(part.kind)}; this model takes: {takes}", field=part.field
                )
