"""What a request gives back while it runs: typed deltas, the last one `Finished`."""

from __future__ import annotations

import msgspec
import numpy as np


class TopToken(msgspec.Struct, frozen=True, array_like=True):
    """A token and how likely it was."""

    token_id: int
    logprob: float
    """Natural logarithm, of the model's own distribution (temperature and filters not applied)."""
    rank: int
    """1 for the most likely one."""
    text: str
    """What the token decodes to; U+FFFD where it is a part of a character."""
    data: bytes
    """Its bytes; empty for tokens that stand for no text."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token of the output (or the prompt), with the most likely ones in its place."""

    chosen: TopToken
    top: list[TopToken] = []
    """As many as were asked for, the most likely first."""


class TextDelta(msgspec.Struct, frozen=True, tag="text"):
    """New text of the stage that talks to the client; `token_ids` are the ids it came from (end token included)."""

    stage: str
    text: str
    token_ids: list[int] = []
    index: int = 0
    """Which of the request's `n` outputs this belongs to."""
    logprobs: list[TokenLogprobs] = []
    """Beside `token_ids`, where asked for."""
    prompt_token_ids: list[int] = []
    """In the first delta of output 0, where asked for."""
    prompt_logprobs: list[TokenLogprobs | None] = []
    """In the first delta of output 0, where asked for: one per prompt token, None for the first."""


class AudioDelta(msgspec.Struct, frozen=True, tag="audio"):
    """New samples: little-endian float32 mono in [-1, 1]."""

    stage: str
    samples: bytes
    sample_rate: int

    @property
    def array(self) -> np.ndarray:
        """[samples] float32."""
        return np.frombuffer(self.samples, dtype="<f4")


class ImageDelta(msgspec.Struct, frozen=True, tag="image"):
    """One picture: raw uint8 RGB, row by row."""

    stage: str
    data: bytes
    height: int
    width: int
    index: int = 0
    """Which of the request's pictures this is."""
    partial: int | None = None
    """Preview number k (from 0) of a picture that is not done, smaller than it; None: the picture itself."""
    tokens: int = 0
    """Latent tokens that the network made it of; 0 of a preview, and where the model counts none."""

    @property
    def array(self) -> np.ndarray:
        """[height, width, 3] uint8."""
        return np.frombuffer(self.data, dtype=np.uint8).reshape(self.height, self.width, 3)


class VideoDelta(msgspec.Struct, frozen=True, tag="video"):
    """The next frames of a video: raw uint8 RGB, frame by frame, row by row."""

    stage: str
    data: bytes
    frames: int
    height: int
    width: int
    fps: float
    index: int = 0
    """Which of the request's videos these belong to."""
    first: int = 0
    """Frames of this video before these."""

    @property
    def array(self) -> np.ndarray:
        """[frames, height, width, 3] uint8."""
        return np.frombuffer(self.data, dtype=np.uint8).reshape(self.frames, self.height, self.width, 3)


class ProgressDelta(msgspec.Struct, frozen=True, tag="progress"):
    """A denoising step is done; sent where the request asks for `progress`."""

    stage: str
    step: int
    """Steps done so far."""
    steps: int
    index: int = 0
    """Which of the request's pictures or videos."""


class EmbeddingDelta(msgspec.Struct, frozen=True, tag="embedding"):
    """What a text means, as one vector: little-endian float32."""

    stage: str
    data: bytes

    @property
    def array(self) -> np.ndarray:
        """[dimensions] float32."""
        return np.frombuffer(self.data, dtype="<f4")


class ScoreDelta(msgspec.Struct, frozen=True, tag="score"):
    """How well two texts fit, as one number."""

    stage: str
    score: float


class ClassesDelta(msgspec.Struct, frozen=True, tag="classes"):
    """How much each class of a classifier fits a text: little-endian float32."""

    stage: str
    data: bytes
    label: str
    """The name of the class that fits best."""

    @property
    def array(self) -> np.ndarray:
        """[classes] float32."""
        return np.frombuffer(self.data, dtype="<f4")


class TokensDelta(msgspec.Struct, frozen=True, tag="tokens"):
    """The prompt as the model sees it: what the input stage gives where a request asks for the modality `tokens`."""

    stage: str
    token_ids: list[int]
    token_strs: list[str]
    """Beside `token_ids`: each token as the vocabulary writes it; empty where the checkpoint has no tokenizer."""
    text: str
    """What the ids decode to, special tokens included; empty where the checkpoint has no tokenizer."""
    frames: int = 0
    """Of the recording's spectrogram, where the model writes down what it hears."""
    seconds: float = 0.0
    """Of that recording."""


class SegmentDelta(msgspec.Struct, frozen=True, tag="segment"):
    """A part of what was heard has its text, which came in the text delta before."""

    stage: str
    start: float
    """Seconds from the recording's beginning."""
    end: float
    text: str
    token_ids: list[int]
    """Marks of time included."""
    seek: int
    """The frame at which the window begins that it was heard in."""
    logprob: float | None = None
    """Mean log-probability of its tokens, by the model's own distribution, where asked for."""


class Usage(msgspec.Struct):
    """Token counts of a request, per modality."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_modalities: dict[str, int] = {}
    """`text`, `image`, `audio`, `video`: prompt tokens of that kind."""
    completion_modalities: dict[str, int] = {}
    """`text`: reply tokens · `audio`: codes of the talker · `image`: latent tokens of the pictures."""

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
    """1, and one more for every worker lost on the way."""
    spans: list[tuple[str, str, float, float]] = []
    """(stage, what, start, end) in seconds since admission: the request's timeline. `queue`: until its first input was
    there, `first`: until its first output, `run`: until its last."""

    @property
    def rtf(self) -> float | None:
        """Real-time factor: time to make the audio over the audio's length."""
        return self.jct / self.audio_seconds if self.audio_seconds else None


class Choice(msgspec.Struct, frozen=True):
    """How one of the request's `n` outputs of the main stage ended."""

    index: int
    finish_reason: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over its tokens, where the stage computed logprobs (`logprobs`, `best_of`, beams)."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the family's end token."""


class ChoiceEnded(msgspec.Struct, frozen=True, tag="ended"):
    """One of several outputs has ended; others may go on. Each stands in `Finished` as well."""

    stage: str
    choice: Choice


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The last delta of a request."""

    finish_reason: str
    """`stop` (end token or stop string), `length` or `repetition`, of the stage that makes the main output."""
    token_ids: dict[str, list[int]]
    """All generated ids of every autoregressive stage, end token included."""
    usage: Usage
    metrics: RequestMetrics
    language: str | None = None
    """Code of the language that was heard, where the model writes down what it hears."""
    audio_seconds: float = 0.0
    """Of the recording that was heard."""
    choices: list[Choice] = []
    """The outputs of the main stage, where it is autoregressive, by index."""


ClientDelta = (
    TextDelta
    | AudioDelta
    | ImageDelta
    | VideoDelta
    | ProgressDelta
    | EmbeddingDelta
    | ScoreDelta
    | ClassesDelta
    | TokensDelta
)
"""What stages make; the orchestrator adds the others."""
Delta = ClientDelta | SegmentDelta | ChoiceEnded | Finished
