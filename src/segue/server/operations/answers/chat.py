"""Answers of chat completions and completions, and what all generations answer with."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class Logprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Logprob):
    top_logprobs: list[Logprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Usage(TypedDict):
    """Details count tokens by modality: `text_tokens`, `image_tokens`, …"""

    prompt_tokens: int
    completion_tokens: NotRequired[int]
    total_tokens: int
    prompt_tokens_details: NotRequired[dict[str, int]]
    completion_tokens_details: NotRequired[dict[str, int]]


class Url(TypedDict):
    url: str


class ImagePart(TypedDict):
    type: Literal["image_url"]
    image_url: Url


class Audio(TypedDict, total=False):
    """In a stream, pieces of the audio."""

    id: str
    data: str
    expires_at: int
    transcript: str
    format: str
    sample_rate: int


class CalledFunction(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCall(TypedDict):
    """`index`, and arguments in pieces, only in a stream."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | list[ImagePart] | None
    refusal: None
    annotations: None
    audio: Audio | None
    function_call: None
    reasoning: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    images: NotRequired[list[ImagePart]]


class Video(TypedDict):
    """The next bytes of an MP4 file, in base64, with facts about the frames so far."""

    data: str
    format: Literal["mp4"]
    height: int
    width: int
    fps: float
    frames: int


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str | None
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCall]
    audio: Audio
    images: list[ImagePart]
    video: Video


class Span(TypedDict):
    stage: str
    what: str
    start: float
    end: float


class Metrics(TypedDict):
    jct: float
    ttft: float | None
    ttfa: float | None
    rtf: float | None
    audio_seconds: float
    attempts: int
    spans: list[Span]


class Own(TypedDict, total=False):
    """Fields that this server adds on request."""

    token_ids: dict[str, list[int]]
    metrics: Metrics


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None
    segue: NotRequired[Own]


class TurnEnded(TypedDict):
    finish_reason: str
    stop_reason: str | int | None


class ChatStreamChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    token_ids: list[int] | None
    turn_ended: NotRequired[TurnEnded]
    """Over the websocket: the model has replied to what was appended so far."""
    segue: NotRequired[Own]


class Whole(TypedDict):
    """Keys of whole answers that are always null here."""

    service_tier: None
    system_fingerprint: None
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class ChatAnswer(Whole):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatStreamChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int] | None]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    segue: NotRequired[Own]


class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class CompletionAnswer(Whole):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
