"""The vocoder: rows of delayed codes → frames → samples, by the decoder of the codec over windows of frames.

The codec is not causal: a sample depends on frames before and after its own. A piece of an utterance is decoded with as
many frames around it as its samples depend on (`reach`), so that the pieces, in any split, give what one call over the
whole utterance gives. The look-ahead of the published shape is 10 frames (0.4 s at 25 frames per second), and 7 more
rows for the delay of the codebooks.

K codebooks, n rows or frames, t samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import ConfigError, StageFailed, nearest
from segue.models.shared.speech.windows import WindowPiece, decode_windows
from segue.models.speech.higgs_audio_v2.library import DacDecoder
from segue.models.speech.higgs_audio_v2.loading import SPECIAL, load_codec, load_codec_config, load_config

PIECES = (2, 4, 8, 16, 32)
"""Frames of an utterance's first, second, … piece; the last entry repeats. Later pieces grow, because each is decoded
with the frames around it."""


def reach(decoder: DacDecoder) -> tuple[int, int]:
    """(frames before, frames after) a frame on which its samples depend, at most."""
    rate, behind, ahead = 1, 0.0, 0.0
    modules: Any = decoder.modules()
    for module in modules:
        match module:
            case torch.nn.Conv1d():
                way = module.dilation[0] * (module.kernel_size[0] - 1) / 2
                behind, ahead = behind + way / rate, ahead + way / rate
            case torch.nn.ConvTranspose1d():
                kernel, stride, padding = module.kernel_size[0], module.stride[0], int(module.padding[0])
                behind += (kernel - 1 - padding) / stride / rate
                ahead += padding / stride / rate
                rate *= stride
    return math.ceil(behind), math.ceil(ahead)


@dataclass(slots=True)
class Utterance:
    """The state of a request in this stage, until its last samples are emitted."""

    request_id: str
    rows: Tensor
    """[n, K] long: the delayed rows, from the one after the first that holds a code of frame `first`."""
    first: int = 0
    """The first frame that later pieces depend on."""
    received: int = 0
    """Number of rows received, that of the beginning included."""
    planned: int = 0
    """Frames in pieces."""
    pieces: int = 0
    complete: bool = False
    """The last piece is planned."""


class Vocoder:
    """The codec's decoder as a stage; always float32.

    In: `{"codes": LongTensor [n, K], "start": int}`, delayed rows; the first row of an utterance is its beginning. Out,
    per piece: `{"samples": FloatTensor [t] on the CPU, "start": index of the first one, "sample_rate": int}`.
    """

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an option, because it has none, and for an unreadable checkpoint."""
        for name in ctx.options:
            raise ConfigError(f"the vocoder has no option {name!r}{nearest(name, ())}", field=name)
        codec = load_codec_config(ctx.model_dir, load_config(ctx))
        self.library_codec = load_codec(ctx, codec)
        self._device = ctx.device
        self._groups, self._codes = codec.num_quantizers, codec.codebook_size
        self._rate: int = codec.sample_rate
        self._hop = math.prod(codec.acoustic_model_config.upsampling_ratios)
        self.behind, self.ahead = reach(self.library_codec.acoustic_decoder)

    def warm_up(self) -> None:
        """Decode the first two pieces of an utterance."""
        utterance = self._open("warm-up")
        codes = torch.zeros(sum(PIECES[:2]) + self._groups, self._groups, dtype=torch.long)
        for work in self.feed(utterance, "", {"codes": codes, "start": 0}, final=True):
            self.run([work])

    def begin(self, request: StageRequest) -> tuple[Utterance, list[Work]]:
        return self._open(request.request_id), []

    def feed(self, state: Utterance, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Append rows and plan pieces; repeated rows (the stage before it restarted) are dropped by their index.

        Raises `StageFailed` for codes that are missing or out of range.
        """
        if state.complete:
            return []
        self._append(state, payload["codes"], payload["start"])
        frames = max(state.received - self._groups, 0)  # the first row holds no frame
        works = []
        while (count := PIECES[min(state.pieces, len(PIECES) - 1)]) + self.ahead <= frames - state.planned:
            works.append(self._plan(state, count, frames))
        if final:
            state.complete = True
            if frames > state.planned or not works:
                works.append(self._plan(state, frames - state.planned, frames))
            works[-1].last = True
        return works

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """Decode pieces of one shape as one batch."""
        return decode_windows(works, lambda codes: self.library_codec(codes.to(self._device)), self._hop, self._rate)

    def end(self, state: Utterance) -> None:
        state.complete = True

    def _open(self, request_id: str) -> Utterance:
        return Utterance(request_id, torch.empty(0, self._groups, dtype=torch.long))

    def _append(self, state: Utterance, codes: Tensor, start: int) -> None:
        if start > state.received:
            raise StageFailed(f"rows {state.received} to {start - 1} of request {state.request_id!r} never came")
        new = codes[state.received - start :].to("cpu", torch.long)
        if not len(new):
            return
        if list(new.shape[1:]) != [self._groups]:
            raise StageFailed(f"rows of {list(new.shape[1:])} codes came; the vocoder takes {self._groups}")
        wrong = new[(new < 0) | (new >= self._codes + SPECIAL)]
        if len(wrong):
            raise StageFailed(f"code {int(wrong[0])} is outside the codebook, which has codes 0 to {self._codes - 1}")
        # the beginning and the end of the stream are decoded as the last code, as in the library
        state.rows = torch.cat([state.rows, new[1:] if state.received == 0 else new])
        state.received += len(new)

    def _plan(self, state: Utterance, count: int, frames: int) -> Work:
        stop = min(state.planned + count + self.ahead, frames)
        window = torch.stack(
            [state.rows[book : book + stop - state.first, book] for book in range(self._groups)]
        ).clamp(max=self._codes - 1)
        skipped = state.planned - state.first
        piece = WindowPiece(window, skipped, count, state.planned)
        played_at = state.planned * self._hop / self._rate
        state.planned += count
        state.pieces += 1
        first = max(state.planned - self.behind, 0)
        state.rows = state.rows[first - state.first :]
        state.first = first
        bucket = (window.shape[1], skipped, count)
        return Work(state.request_id, piece, bucket=bucket, cost=max(1, window.shape[1]), played_at=played_at)
