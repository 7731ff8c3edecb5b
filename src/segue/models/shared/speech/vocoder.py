"""A vocoder as a streaming stage: chunks of rows in, chunks of waveform out.

An utterance is decoded in pieces, whose lengths depend only on their index, that of the last one on what is left: the
samples do not depend on how rows arrived, on load, or on the rest of the batch.

A request holds, whatever the length of its utterance, what the network keeps of it (`pieces`), and the frames of a
piece that is not complete yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import ConfigError, StageFailed, nearest
from segue.models.shared.speech.pieces import CodePiece, Past, PieceDecoder
from segue.models.shared.speech.rows import new_rows


def check_options(ctx: LoadContext, known: Sequence[str] = ()) -> None:
    """Raise `ConfigError` for an option of the deployment that is not `known`."""
    for name in ctx.options:
        if name not in known:
            raise ConfigError(f"the vocoder has no option {name!r}{nearest(name, known)}", field=name)


@dataclass(slots=True)
class Utterance:
    """The state of a request in this stage, until its last samples are emitted."""

    request_id: str
    rows: Tensor
    """[m, row]: rows that later frames need."""
    frames: Tensor
    """[n, K]: the frames from the first that no piece has."""
    received: int = 0
    """Number of rows received."""
    planned: int = 0
    """Frames in pieces."""
    pieces: int = 0
    complete: bool = False
    """The last piece is planned."""
    past: Past | None = None
    samples: int = 0
    """Number of samples emitted."""


@dataclass(slots=True)
class _Piece:
    """One piece of an utterance, as a work item. Keeps its result, so that a repeated call computes nothing twice."""

    utterance: Utterance
    codes: Tensor
    """[K, n + ahead]."""
    first: int
    ahead: int
    payload: Payload | None = None


class StreamingVocoder:
    """`ModuleModel` over a network that decodes utterances piece by piece.

    In: `{"codes": Tensor [n, row], "start": int}`, a row of codes (long) or numbers (float32) per step.
    Out, per piece: `{"samples": FloatTensor [n] on the CPU, "start": index of the first one, "sample_rate": int}`.
    """

    def __init__(
        self,
        ctx: LoadContext,
        decoder: PieceDecoder,
        sample_rate: int,
        frame_rate: float,
        options: Sequence[str] = (),
    ) -> None:
        """Both rates are per second. Raises `ConfigError` for an option that is not one of `options`."""
        check_options(ctx, options)
        self.decoder = decoder
        self._rate = sample_rate
        self._frame_rate = frame_rate

    def warm_up(self) -> None:
        """Decode the first two pieces of an utterance."""
        utterance = self._open("warm-up")
        frames = sum(self.decoder.counts[:2]) + self.decoder.ahead
        utterance.frames = torch.zeros(frames, self.decoder.groups, dtype=self.decoder.dtype)
        for work in self._cut(utterance, final=False):
            self.run([work])

    def begin(self, request: StageRequest) -> tuple[Utterance, list[Work]]:
        return self._open(request.request_id), []

    def feed(self, state: Utterance, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Append rows and plan pieces; repeated rows (the stage before it restarted) are dropped by their index.

        Raises `StageFailed` for rows that are missing and codes that are out of range.
        """
        if state.complete:
            return []
        self._append(state, payload["codes"], payload["start"])
        return self._cut(state, final=final)

    def run(self, works: list[Work]) -> list[Result]:
        """Decode pieces of one shape as one batch."""
        pieces: list[_Piece] = [work.item for work in works]
        self._decode([piece for piece in pieces if piece.payload is None])
        return [Result(piece.payload) for piece in pieces]

    def end(self, state: Utterance) -> None:
        state.complete = True
        state.past = None

    def _open(self, request_id: str) -> Utterance:
        decoder = self.decoder
        rows, frames = (torch.empty(0, width, dtype=decoder.dtype) for width in (decoder.row, decoder.groups))
        return Utterance(request_id, rows, frames)

    def _append(self, state: Utterance, codes: Tensor, start: int) -> None:
        new = new_rows(codes, start, state.received, state.request_id).to("cpu", self.decoder.dtype)
        if not len(new):
            return
        if list(new.shape[1:]) != [self.decoder.row]:
            raise StageFailed(f"rows of {list(new.shape[1:])} codes came; the vocoder takes {self.decoder.row}")
        frames, rows = self.decoder.frames(torch.cat([state.rows, new]), state.received - len(state.rows))
        state.received += len(new)
        state.frames, state.rows = torch.cat([state.frames, frames]), rows

    def _cut(self, state: Utterance, *, final: bool) -> list[Work]:
        """Work for the pieces whose frames, and those that they look ahead at, have arrived."""
        counts, ahead = self.decoder.counts, self.decoder.ahead
        works = []
        while (count := counts[min(state.pieces, len(counts) - 1)]) + ahead <= len(state.frames):
            works.append(self._plan(state, count, ahead))
        if final:
            state.complete = True
            if len(state.frames) or not works:
                works.append(self._plan(state, len(state.frames), 0))
            works[-1].last = True
        return works

    def _plan(self, state: Utterance, count: int, ahead: int) -> Work:
        piece = _Piece(state, state.frames[: count + ahead].T.contiguous(), state.planned, ahead)
        again = min(state.planned, self.decoder.behind)
        bucket = (count, ahead, again, state.planned == 0)
        played_at = state.planned / self._frame_rate
        state.frames = state.frames[count:]
        state.planned += count
        state.pieces += 1
        cost = max(1, again + count + ahead)
        return Work(state.request_id, piece, bucket=bucket, cost=cost, played_at=played_at)

    def _decode(self, pieces: list[_Piece]) -> None:
        asked = [CodePiece(piece.codes, piece.first, piece.utterance.past, piece.ahead) for piece in pieces]
        if asked and asked[0].codes.shape[1]:
            decoded = self.decoder.decode(asked)
        else:  # an utterance that ended with a piece, or without a frame
            decoded = [(torch.empty(0), piece.utterance.past) for piece in pieces]
        for piece, (samples, past) in zip(pieces, decoded, strict=True):
            utterance = piece.utterance
            piece.payload = {"samples": samples, "start": utterance.samples, "sample_rate": self._rate}
            utterance.past = past
            utterance.samples += len(samples)
