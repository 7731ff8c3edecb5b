"""The output of a finished request for a Python caller."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from segue.messages.deltas import (
    AudioDelta,
    Choice,
    ClassesDelta,
    Delta,
    EmbeddingDelta,
    Finished,
    ImageDelta,
    ModelDelta,
    RequestMetrics,
    ScoreDelta,
    SegmentDelta,
    TextDelta,
    TokenLogprobs,
    Usage,
    VideoDelta,
)


@dataclass(slots=True)
class Audio:
    """An audio clip; samples: [samples] float32 mono in [-1, 1]."""

    samples: np.ndarray
    sample_rate: int


@dataclass(slots=True)
class Video:
    """A video as an array of frames."""

    frames: np.ndarray
    """[frames, height, width, 3] uint8."""
    fps: float
    """Frames per second."""

    def save(self, path: str | os.PathLike[str], *, audio: Audio | None = None) -> None:
        """Write an MP4 file (H.264, AAC), completely or not at all. Raises `OSError`."""
        from segue.media.write_video import VideoWriter

        with VideoWriter(path, fps=self.fps, sample_rate=audio.sample_rate if audio is not None else None) as video:
            video.add(self.frames)
            if audio is not None:
                video.add_audio(audio.samples)


@dataclass(slots=True)
class Output:
    """One of the outputs of the stage that makes the main output."""

    index: int
    text: str
    token_ids: list[int]
    """End token included."""
    finish_reason: str
    cumulative_logprob: float | None = None
    """Sum over its tokens, if it was computed (`logprobs`, `best_of`, beams)."""
    stop_reason: int | str | None = None
    """The request's stop token or stop string that ended it; None for the family's end token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per entry of `token_ids`, if requested."""


@dataclass(slots=True)
class RequestOutput:
    """All results of one request. `text`, `token_ids`, `finish_reason` and others without an index: of output 0."""

    request_id: str
    text: str = ""
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    """By autoregressive stage, end token included."""
    audio: Audio | None = None
    images: list[Any] = field(default_factory=list)
    """PIL images, in the order of `num_images_per_prompt`, without previews."""
    videos: list[Video] = field(default_factory=list)
    embedding: np.ndarray | None = None
    """[dimensions] float32, from a model of embeddings."""
    score: float | None = None
    """How well two texts match, from a cross-encoder."""
    classes: np.ndarray | None = None
    """[classes] float32: the classifier's scores, in the checkpoint's order."""
    label: str | None = None
    """The name of the best class."""
    segments: list[SegmentDelta] = field(default_factory=list)
    """Segments of a recording transcribed with timestamps."""
    language: str | None = None
    """Language code of the recording."""
    finish_reason: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token id of the main stage, if requested."""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One per prompt token, None for the first, if requested."""
    outputs: list[Output] = field(default_factory=list)
    """By index; one unless `n` asks for more; none if the main stage makes no tokens."""
    models: dict[str, RequestOutput] = field(default_factory=dict)
    """In a graph of models: outputs that the request asked for by a model's name, by model."""
    usage: Usage = field(default_factory=Usage)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class Collector:
    """Collects the deltas of a request into a `RequestOutput`."""

    def __init__(self, request_id: str, *, wants_audio: bool, sample_rate: int = 24000) -> None:
        self._output = RequestOutput(request_id)
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}
        self._choices: list[Choice] = []
        self._samples: list[np.ndarray] = []
        self._images: dict[int, ImageDelta] = {}
        self._videos: dict[int, list[VideoDelta]] = {}
        self._rate = sample_rate
        self._wants_audio = wants_audio
        self._models: dict[str, Collector] = {}

    def add(self, delta: Delta) -> None:
        match delta:
            case TextDelta():
                self._texts.setdefault(delta.index, []).append(delta.text)
                self._logprobs.setdefault(delta.index, []).extend(delta.logprobs)
                self._output.prompt_token_ids += delta.prompt_token_ids
                self._output.prompt_logprobs += delta.prompt_logprobs
            case AudioDelta():
                self._samples.append(delta.array)
                self._rate = delta.sample_rate
            case ImageDelta():
                if delta.partial is None:
                    self._images[delta.index] = delta
            case VideoDelta():
                self._videos.setdefault(delta.index, []).append(delta)
            case EmbeddingDelta():
                self._output.embedding = delta.array
            case ScoreDelta():
                self._output.score = delta.score
            case ClassesDelta():
                self._output.classes, self._output.label = delta.array, delta.label
            case ModelDelta():
                if delta.model not in self._models:
                    self._models[delta.model] = Collector(self._output.request_id, wants_audio=False)
                self._models[delta.model].add(delta.delta)
            case SegmentDelta():
                self._output.segments.append(delta)
            case Finished():
                self._output.language = delta.language
                self._output.finish_reason = delta.finish_reason
                self._output.token_ids = delta.token_ids
                self._output.usage = delta.usage
                self._output.metrics = delta.metrics
                self._choices = delta.choices

    def output(self) -> RequestOutput:
        self._output.text = self._text(0)
        self._output.logprobs = self._logprobs.get(0, [])
        self._output.outputs = [
            Output(
                choice.index,
                self._text(choice.index),
                choice.token_ids,
                choice.finish_reason,
                choice.cumulative_logprob,
                choice.stop_reason,
                self._logprobs.get(choice.index, []),
            )
            for choice in self._choices
        ]
        if self._images:
            from PIL import Image

            self._output.images = [Image.fromarray(self._images[index].array) for index in sorted(self._images)]
        self._output.videos = [
            Video(np.concatenate([piece.array for piece in pieces]), pieces[0].fps)
            for _, pieces in sorted(self._videos.items())
        ]
        self._output.models = {name: collector.output() for name, collector in self._models.items()}
        if self._wants_audio or self._samples:
            samples = np.concatenate(self._samples) if self._samples else np.zeros(0, dtype=np.float32)
            self._output.audio = Audio(samples, self._rate)
        return self._output

    def _text(self, index: int) -> str:
        return "".join(self._texts.get(index, []))
