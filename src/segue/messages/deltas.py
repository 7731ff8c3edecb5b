"""The typed deltas that a running request streams to its client; the last one is `Finished`.

A delta of a stage is a range of units of one output, its `Stream`. It begins with unit `start` and ends before unit
`end`, counted from the beginning of the output, whatever attempt of the stage makes it. So one rule, `after`, says what
a client has already.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np


class TopToken(msgspec.Struct, frozen=True, array_like=True):
    """A token with its log-probability and rank."""

    token_id: int
    logprob: float
    """Natural logarithm, under the model's own distribution (before temperature and filters)."""
    rank: int
    """1 for the most likely token."""
    text: str
    """The decoded token; U+FFFD where it is a part of a character."""
    data: bytes
    """The token's bytes; empty for tokens that stand for no text."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token of the output (or the prompt), with the most likely tokens at its position."""

    chosen: TopToken
    top: list[TopToken] = []
    """As many as requested, the most likely first."""


Stream = tuple[str, str, int]
"""(stage, kind, index of the output)"""


class _Numbered(msgspec.Struct, frozen=True, kw_only=True):
    """Base of deltas whose `start` the worker sets by counting. Unless `end` says otherwise, a delta is one unit and is
    never split."""

    kind: ClassVar[str]
    index: int = 0
    """Which of the request's outputs of this stage it belongs to."""
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + 1


class TextDelta(_Numbered, frozen=True, tag="text"):
    """New text of the stage that answers the client; `token_ids` are the ids it came from (end token included). Its
    units are characters."""

    kind: ClassVar[str] = "text"
    stage: str
    text: str
    token_ids: list[int] = []
    first_id: int = 0
    """Token ids of this output that precede these. Text may be held back, so characters do not tell it."""
    logprobs: list[TokenLogprobs] = []
    """One per entry of `token_ids`, if requested."""
    prompt_token_ids: list[int] = []
    """In the first delta of output 0, if requested."""
    prompt_logprobs: list[TokenLogprobs | None] = []
    """In the first delta of output 0, if requested: one per prompt token, None for the first."""

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class AudioDelta(_Numbered, frozen=True, tag="audio"):
    """New samples, its units: little-endian float32 mono in [-1, 1]."""

    kind: ClassVar[str] = "audio"
    stage: str
    samples: bytes
    sample_rate: int

    @property
    def array(self) -> np.ndarray:
        """[samples] float32."""
        return np.frombuffer(self.samples, dtype="<f4")

    @property
    def end(self) -> int:
        return self.start + len(self.samples) // 4


IMAGE_START = 1 << 31
"""Unit of an image that is the image itself; the units before it are its previews, which nobody needs after it."""


class ImageDelta(msgspec.Struct, frozen=True, tag="image"):
    """One image or a preview of it: raw uint8 RGB, row by row."""

    kind: ClassVar[str] = "image"
    stage: str
    data: bytes
    height: int
    width: int
    index: int = 0
    """Which of the request's images this is."""
    partial: int | None = None
    """Number (from 0) of a preview of the unfinished image, which is smaller than the image; None: the image itself."""
    tokens: int = 0
    """Latent tokens that the network made the image from; 0 for a preview and for models that count none."""

    @property
    def array(self) -> np.ndarray:
        """[height, width, 3] uint8."""
        return np.frombuffer(self.data, dtype=np.uint8).reshape(self.height, self.width, 3)

    @property
    def start(self) -> int:
        return IMAGE_START if self.partial is None else self.partial

    @property
    def end(self) -> int:
        return self.start + 1


class VideoDelta(msgspec.Struct, frozen=True, tag="video"):
    """The next frames of a video, its units: raw uint8 RGB, frame by frame, row by row."""

    kind: ClassVar[str] = "video"
    stage: str
    data: bytes
    frames: int
    height: int
    width: int
    fps: float
    index: int = 0
    """Which of the request's videos these belong to."""
    start: int = 0

    @property
    def array(self) -> np.ndarray:
        """[frames, height, width, 3] uint8."""
        return np.frombuffer(self.data, dtype=np.uint8).reshape(self.frames, self.height, self.width, 3)

    @property
    def end(self) -> int:
        return self.start + self.frames


class EncodedDelta(msgspec.Struct, frozen=True, tag="encoded"):
    """The next bytes of a file, in the format of `Request.formats`, made by the output stage. Its units are the bytes
    of the output's files, and one for the end of each."""

    stage: str
    """The stage whose output is in the file."""
    kind: str
    """Its modality."""
    index: int
    """Which of the request's outputs of this kind it is."""
    start: int
    mime: str
    data: bytes
    last: bool = False
    """The file ends with these bytes."""
    facts: dict[str, int | float] = {}
    """About the output as far as it has been encoded. Audio: `sample_rate` of the model, `seconds` of the model's
    audio. Images: `height`, `width`, latent `tokens`; `partial`, the number of a preview. The previews of an unfinished
    image are of the kind `preview`, one file after the other. Videos: `height`, `width`, `fps`, `frames`."""

    @property
    def end(self) -> int:
        return self.start + len(self.data) + self.last


class ProgressDelta(msgspec.Struct, frozen=True, tag="progress"):
    """A denoising step, its unit, is done; sent if the request asks for `progress`."""

    kind: ClassVar[str] = "progress"
    stage: str
    step: int
    """Steps done so far."""
    steps: int
    index: int = 0
    """Which of the request's images or videos this is about."""

    @property
    def start(self) -> int:
        return self.step - 1

    @property
    def end(self) -> int:
        return self.step


class EmbeddingDelta(_Numbered, frozen=True, tag="embedding"):
    """The embedding of a text, one vector: little-endian float32."""

    kind: ClassVar[str] = "embedding"
    stage: str
    data: bytes

    @property
    def array(self) -> np.ndarray:
        """[dimensions] float32."""
        return np.frombuffer(self.data, dtype="<f4")


class ScoreDelta(_Numbered, frozen=True, tag="score"):
    """How well two texts match, as one number."""

    kind: ClassVar[str] = "score"
    stage: str
    score: float


class ClassesDelta(_Numbered, frozen=True, tag="classes"):
    """A classifier's score of each class for a text: little-endian float32."""

    kind: ClassVar[str] = "classes"
    stage: str
    data: bytes
    label: str
    """The name of the best class."""

    @property
    def array(self) -> np.ndarray:
        """[classes] float32."""
        return np.frombuffer(self.data, dtype="<f4")


class TokensDelta(_Numbered, frozen=True, tag="tokens"):
    """The prompt as the model sees it; the input stage sends it if a request asks for the modality `tokens`."""

    kind: ClassVar[str] = "tokens"
    stage: str
    token_ids: list[int]
    token_strs: list[str]
    """One per entry of `token_ids`: the token as the vocabulary writes it; empty if the checkpoint has no tokenizer."""
    text: str
    """The decoded ids, special tokens included; empty if the checkpoint has no tokenizer."""
    frames: int = 0
    """Frames of the recording's spectrogram, if the model transcribes speech."""
    seconds: float = 0.0
    """Length of that recording."""


class SegmentDelta(msgspec.Struct, frozen=True, tag="segment"):
    """One transcribed segment of a recording; its text came in the preceding text delta."""

    stage: str
    start: float
    """Seconds from the start of the recording."""
    end: float
    text: str
    token_ids: list[int]
    """Timestamp tokens included."""
    seek: int
    """The first frame of the window that holds the segment."""
    logprob: float | None = None
    """Mean log-probability of its tokens under the model's own distribution, if requested."""


class Usage(msgspec.Struct):
    """Token counts of a request, per modality."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_modalities: dict[str, int] = {}
    """`text`, `image`, `audio`, `video`: prompt tokens of that kind."""
    completion_modalities: dict[str, int] = {}
    """`text`: reply tokens · `audio`: codes of the talker · `image`: latent tokens of the images."""

    @property
    def completion_tokens(self) -> int:
        return sum(self.completion_modalities.values())


class RequestMetrics(msgspec.Struct):
    """Times in seconds since the request was admitted (the paper, §4.1: JCT, TTFT, TTFA, RTF)."""

    jct: float = 0.0
    ttft: float | None = None
    ttfa: float | None = None
    audio_seconds: float = 0.0
    attempts: int = 1
    """1, plus one for every worker lost on the way."""
    spans: list[tuple[str, str, float, float]] = []
    """(stage, phase, start, end) in seconds since admission: the request's timeline. `queue`: until the first input
    arrived, `first`: until the first output, `run`: until the last output."""

    @property
    def rtf(self) -> float | None:
        """Real-time factor: time to make the audio divided by the audio's length."""
        return self.jct / self.audio_seconds if self.audio_seconds else None


class Choice(msgspec.Struct, frozen=True):
    """How one of the request's `n` outputs of the main stage ended."""

    index: int
    finish_reason: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over its tokens, if the stage computed logprobs (`logprobs`, `best_of`, beams)."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the family's end token."""


class ChoiceEnded(msgspec.Struct, frozen=True, tag="ended"):
    """One of several outputs has ended; others may go on. `Finished` lists each of them as well."""

    stage: str
    choice: Choice


class TurnEnded(msgspec.Struct, frozen=True, tag="turn_ended"):
    """The model has replied to what was appended to an open request so far, and waits for more."""

    stage: str
    finish_reason: str
    """`stop`, `length` or `repetition`."""
    stop_reason: int | str | None = None
    """The request's stop token or stop string that ended the reply."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The last delta of a request."""

    finish_reason: str
    """`stop` (end token or stop string), `length` or `repetition`, of the stage that makes the main output."""
    token_ids: dict[str, list[int]]
    """All generated ids of every autoregressive stage, end token included."""
    usage: Usage
    metrics: RequestMetrics
    language: str | None = None
    """Code of the spoken language, if the model transcribes speech."""
    audio_seconds: float = 0.0
    """Length of the transcribed recording."""
    choices: list[Choice] = []
    """The outputs of the main stage, if it is autoregressive, by index."""


class ModelDelta(msgspec.Struct, frozen=True, tag="model"):
    """An output that the client requested of one model of a graph of models by the model's name, e.g. `hear.text`."""

    model: str
    """Of a later visit with its number: `hear@1`."""
    delta: TextDelta | AudioDelta | ImageDelta | Finished


ClientDelta = (
    TextDelta
    | AudioDelta
    | ImageDelta
    | VideoDelta
    | EncodedDelta
    | ProgressDelta
    | EmbeddingDelta
    | ScoreDelta
    | ClassesDelta
    | TokensDelta
)
"""Deltas that stages make; the orchestrator adds the others."""
Delta = ClientDelta | SegmentDelta | ChoiceEnded | TurnEnded | ModelDelta | Finished


def stream_of(delta: ClientDelta) -> Stream:
    """Return the output that a delta is a part of."""
    return delta.stage, delta.kind, delta.index


def after(delta: ClientDelta, have: int, ids: int = 0) -> ClientDelta | None:
    """Return a delta without the units before `have`, and a text without the token ids before `ids`; None if nothing is
    left."""
    if isinstance(delta, TextDelta):
        return _text_after(delta, max(0, have - delta.start), max(0, ids - delta.first_id))
    if have >= delta.end:
        return None
    skip = have - delta.start
    if skip <= 0:
        return delta
    match delta:
        case AudioDelta():
            return msgspec.structs.replace(delta, samples=delta.samples[4 * skip :], start=have)
        case VideoDelta():
            data = delta.data[skip * delta.height * delta.width * 3 :]
            return msgspec.structs.replace(delta, data=data, frames=delta.frames - skip, start=have)
        case EncodedDelta():
            return msgspec.structs.replace(delta, data=delta.data[skip:], start=have)
    raise AssertionError(f"a delta of {delta.kind} is one unit")


def _text_after(delta: TextDelta, skip: int, skip_ids: int) -> TextDelta | None:
    text, token_ids = delta.text[skip:], delta.token_ids[skip_ids:]
    if not text and not token_ids:
        return None
    if not skip and not skip_ids:
        return delta
    return msgspec.structs.replace(
        delta,
        text=text,
        token_ids=token_ids,
        start=delta.end - len(text),
        first_id=delta.first_id + len(delta.token_ids) - len(token_ids),
        # ids of an earlier attempt come first and have none
        logprobs=delta.logprobs[-len(token_ids) :] if token_ids else [],
        # what is known of the prompt came with the first token
        prompt_token_ids=[],
        prompt_logprobs=[],
    )
