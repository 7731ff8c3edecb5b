"""Answers of the endpoints for images, audio and videos."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from segue.server.operations.answers.responses import CodedError


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
