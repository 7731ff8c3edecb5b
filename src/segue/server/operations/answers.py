"""Types of all answers: `GET /openapi.json` publishes their schemas, and tests check every answer against them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from segue.orchestrator.service import StageHealth


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


class OutputPart(TypedDict):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[TokenLogprob]]


class OutputItem(TypedDict):
    """A message, a thought or a function call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: str
    role: NotRequired[Literal["assistant"]]
    summary: NotRequired[list[Any]]
    content: NotRequired[list[OutputPart]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class CodedError(TypedDict):
    code: str
    message: str


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(TypedDict):
    """Repeats the request's parameters."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    error: CodedError | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: str
    user: str | None


class ResponseEvent(TypedDict):
    """`type` determines the other keys."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseAnswer]
    item: NotRequired[OutputItem]
    part: NotRequired[OutputPart]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(TypedDict):
    id: str
    object: str
    deleted: Literal[True]


class Listed(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageBlock(TypedDict):
    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: NotRequired[int]
    cache_read_input_tokens: NotRequired[int]
    output_tokens: int


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """`type` determines the other keys."""

    type: str
    message: NotRequired[MessageAnswer]
    index: NotRequired[int]
    content_block: NotRequired[MessageBlock]
    delta: NotRequired[dict[str, str | None]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[dict[str, str]]


class CountedTokens(TypedDict):
    input_tokens: int


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Pooled(TypedDict):
    index: int
    object: Literal["pooling"]
    data: list[float] | str


class Classified(TypedDict):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Scored(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class OfTexts(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: Usage


class PoolingAnswer(OfTexts):
    data: list[Pooled]


class ClassifyAnswer(OfTexts):
    data: list[Classified]


class ScoreAnswer(OfTexts):
    data: list[Scored]


class Document(TypedDict):
    text: str


class Ranked(TypedDict):
    index: int
    document: NotRequired[Document]
    relevance_score: float


class RerankAnswer(TypedDict):
    id: str
    model: str
    results: list[Ranked]
    usage: Usage


class ImageUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class EncodedImage(TypedDict):
    b64_json: str


class ImagesAnswer(TypedDict):
    created: int
    background: str
    output_format: str
    size: str
    seed: int | None
    data: list[EncodedImage]
    usage: ImageUsage


class ImageEvent(TypedDict):
    """`type` determines the other keys."""

    type: str
    image_index: int
    step: NotRequired[int]
    steps: NotRequired[int]
    partial_image_index: NotRequired[int]
    b64_json: NotRequired[str]
    created_at: NotRequired[int]
    size: NotRequired[str]
    seed: NotRequired[int | None]
    quality: NotRequired[str]
    background: NotRequired[str]
    output_format: NotRequired[str]
    usage: NotRequired[ImageUsage | None]


class HeardUsage(TypedDict):
    """Either `seconds` or tokens."""

    type: Literal["duration", "tokens"]
    seconds: NotRequired[int]
    input_tokens: NotRequired[int]
    output_tokens: NotRequired[int]
    total_tokens: NotRequired[int]
    input_token_details: NotRequired[dict[str, int]]


class Segment(TypedDict):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float


class Transcription(TypedDict):
    """Keys other than `text` and `usage` only in `verbose_json`."""

    text: str
    usage: HeardUsage
    task: NotRequired[str]
    language: NotRequired[str | None]
    duration: NotRequired[float]
    segments: NotRequired[list[Segment]]


class TranscriptEvent(TypedDict):
    type: str
    delta: NotRequired[str]
    text: NotRequired[str]
    usage: NotRequired[HeardUsage]


class SpeechUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechEvent(TypedDict):
    type: str
    audio: NotRequired[str]
    usage: NotRequired[SpeechUsage]


class VideoJob(TypedDict):
    id: str
    object: Literal["video"]
    model: str
    status: str
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: None
    prompt: str
    size: str
    seconds: str
    remixed_from_video_id: None
    seed: int
    error: CodedError | None


class Tokens(TypedDict):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class TensorInput(TypedDict):
    dtype: str
    shape: list[int | None]
    tokens: int
    most: int


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    family: str
    takes: list[str]
    gives: list[str]
    tensors: dict[str, TensorInput]
    stages: list[str]
    sampling_stages: list[str]
    voices: list[str]
    options: list[str]
    max_model_len: int | None


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Voices(TypedDict):
    voices: list[str]
    default: str | None
    formats: list[str]


class HealthAnswer(TypedDict):
    model: str
    ready: bool
    stages: dict[str, StageHealth]


class MovedWorker(TypedDict):
    from_stage: str
    to_stage: str
    worker: str
    seconds: float


class Version(TypedDict):
    version: str
