"""The vocoder stage: rows of patches → frames → samples, by the decoder of the audio tokenizer over windows of frames.

The decoder norms over all frames of a call, and looks ahead, so pieces cannot give what one call over the whole gives.
What they give is defined by the published chunked decoding: every call has up to 250 frames that calls before it have
had, and its new ones; the last 40 wait for the next call, which has them again with what follows. The borders of pieces
depend on nothing but their index (`PIECES`), and only pieces of equal windows are batched, each with its own norm: how
codes arrive, and what else is decoded, changes no sample.

K codes per frame, n frames of 40 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import ConfigError, StageFailed, nearest
from segue.models.shared.speech.windows import WindowPiece, decode_windows
from segue.models.speech.mimo_audio.config import read_codec, read_config
from segue.models.speech.mimo_audio.loading import load_decoder

PIECES = (8, 16, 32, 64)
"""Frames of an utterance's first, second, … piece; the last entry repeats. Later pieces grow, because each is decoded
with the frames around it."""
BEFORE = 250
"""Frames of earlier calls that a call has again."""
AHEAD = 40
"""Frames that a call has, but leaves to the next: as far as the layers of the published vocoder look ahead."""
_OPTION = "right_frames"


@dataclass(slots=True)
class Utterance:
    """The state of a request in this stage, until its last samples are emitted."""

    request_id: str
    codes: Tensor
    """[n, K] long: the frames from `first` on."""
    first: int = 0
    received: int = 0
    """Number of rows received, those without a patch included."""
    planned: int = 0
    """Frames in pieces."""
    seen: int = 0
    """Frames that calls have had."""
    pieces: int = 0
    complete: bool = False
    """The last piece is planned."""

    @property
    def frames(self) -> int:
        return self.first + len(self.codes)


class Vocoder:
    """The decoder as a stage; always float32.

    In: `{"codes": LongTensor [k, G · K], "start": int}`, patches; those of empty codes are no frames. Out, per piece:
    `{"samples": FloatTensor [n] on the CPU, "start": index of the first one, "sample_rate": int}`.

    Options: `right_frames`, from 0 to 40, by which a piece waits for what follows it; with fewer than 40 the first
    samples come earlier, and differ from the published decoding.
    """

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for an option, and for an unreadable checkpoint."""
        for name in ctx.options:
            if name != _OPTION:
                raise ConfigError(f"the vocoder has no option {name!r}{nearest(name, (_OPTION,))}", field=name)
        ahead = ctx.options.get(_OPTION, AHEAD)
        if not isinstance(ahead, int) or isinstance(ahead, bool) or not 0 <= ahead <= AHEAD:
            raise ConfigError(f"{_OPTION} is {ahead!r}; it must be from 0 to {AHEAD}", field=_OPTION)
        config = read_config(ctx.model_dir)
        codec = read_codec(ctx.model_dir, config)
        self.net = load_decoder(ctx, codec, config)
        self._ahead = ahead
        self._device = ctx.device
        self._channels, self._group = config.audio_channels, config.group_size
        self._empty = torch.tensor(config.empty_codes)
        self._rate, self._hop = codec.sampling_rate, codec.hop

    def warm_up(self) -> None:
        """Decode the first two pieces of an utterance."""
        utterance = self._open("warm-up")
        patches = -(-(sum(PIECES[:2]) + self._ahead) // self._group)
        codes = torch.zeros(patches, self._group * self._channels, dtype=torch.long)
        for work in self.feed(utterance, "", {"codes": codes, "start": 0}, final=True):
            self.run([work])

    def begin(self, request: StageRequest) -> tuple[Utterance, list[Work]]:
        return self._open(request.request_id), []

    def feed(self, state: Utterance, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Append patches and plan pieces; repeated rows (the stage before it restarted) are dropped by their index.

        Raises `StageFailed` for codes that are missing or out of range.
        """
        if state.complete:
            return []
        self._append(state, payload["codes"], payload["start"])
        works = []
        while (count := PIECES[min(state.pieces, len(PIECES) - 1)]) + self._ahead <= state.frames - state.planned:
            works.append(self._plan(state, count, state.planned + count + self._ahead))
        if final:
            state.complete = True
            if state.frames > state.planned or not works:
                works.append(self._plan(state, state.frames - state.planned, state.frames))
            works[-1].last = True
        return works

    @torch.inference_mode()
    def run(self, works: list[Work]) -> list[Result]:
        """Decode pieces of one shape as one batch."""
        return decode_windows(works, lambda codes: self.net(codes.to(self._device)), self._hop, self._rate)

    def end(self, state: Utterance) -> None:
        state.complete = True

    def _open(self, request_id: str) -> Utterance:
        return Utterance(request_id, torch.empty(0, self._channels, dtype=torch.long))

    def _append(self, state: Utterance, codes: Tensor, start: int) -> None:
        if start > state.received:
            raise StageFailed(f"rows {state.received} to {start - 1} of request {state.request_id!r} never came")
        new = codes[state.received - start :].to("cpu", torch.long)
        state.received += len(new)
        if not len(new):
            return
        if list(new.shape[1:]) != [self._group * self._channels]:
            raise StageFailed(
                f"rows of {list(new.shape[1:])} codes came; the vocoder takes patches of {self._group * self._channels}"
            )
        frames = new.reshape(-1, self._channels)
        frames = frames[frames[:, 0] != self._empty[0]]
        if (broken := (frames < 0) | (frames >= self._empty)).any():
            place, channel = broken.nonzero()[0].tolist()
            raise StageFailed(
                f"code {int(frames[place, channel])} of channel {channel} is outside its codebook, which has codes 0 "
                f"to {int(self._empty[channel]) - 1}"
            )
        state.codes = torch.cat([state.codes, frames])

    def _plan(self, state: Utterance, count: int, stop: int) -> Work:
        """A piece of `count` frames, in a window that ends with frame `stop`."""
        begin = max(state.seen - BEFORE, 0)
        window = state.codes[begin - state.first : stop - state.first]
        skipped = state.planned - begin
        piece = WindowPiece(window, skipped, count, state.planned)
        played_at = state.planned * self._hop / self._rate
        state.planned += count
        state.pieces += 1
        state.seen = stop
        kept = max(stop - BEFORE, 0)
        state.codes = state.codes[kept - state.first :]
        state.first = kept
        bucket = (len(window), skipped, count)
        return Work(state.request_id, piece, bucket=bucket, cost=max(1, len(window)), played_at=played_at)
