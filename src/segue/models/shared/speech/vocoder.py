"""A vocoder as a streaming stage: chunks of codes in, chunks of waveform out.

An utterance is decoded in pieces, whose lengths depend only on their index (`GROUPS`): the samples do not depend on how
codes arrived, on load, or on the rest of the batch, and are those of one call over the whole utterance. The last frame
is decoded with the samples of all frames before it: there is no look-ahead.

A request holds, whatever the length of its utterance, the network's left context (`pieces`), and the codes of a
piece that is not complete yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.messages.errors import ConfigError, StageFailed, nearest
from segue.models.shared.speech.pieces import Past, Piece, PieceDecoder

GROUPS = (2, 2, 4, 4, 8)
"""Frames of an utterance's first, second, … piece; the last entry repeats. Later pieces grow, as each costs a call of
every layer."""


@dataclass(slots=True)
class Utterance:
    """The state of a request in this stage, until its last samples are emitted."""

    request_id: str
    codes: Tensor
    """[n, K]: the frames from the first that no piece has."""
    received: int = 0
    """Number of frames received."""
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
    """[K, n]."""
    first: int
    payload: Payload | None = None


class StreamingVocoder:
    """`ModuleModel` over a network that decodes utterances piece by piece.

    In: `{"codes": Tensor [n, K], "start": int}`, a row of K codes (long) or numbers (float32) per frame.
    Out, per piece: `{"samples": FloatTensor [n] on the CPU, "start": index of the first one, "sample_rate": int}`.
    """

    def __init__(self, ctx: LoadContext, decoder: PieceDecoder, sample_rate: int, frame_rate: float) -> None:
        """Both rates are per second. Raises `ConfigError` for an option, because it has none."""
        for name in ctx.options:
            raise ConfigError(f"the vocoder has no option {name!r}{nearest(name, ())}", field=name)
        self.decoder = decoder
        self._rate = sample_rate
        self._frame_rate = frame_rate

    def warm_up(self) -> None:
        """Decode the first two pieces of an utterance."""
        utterance = self._open("warm-up")
        codes = torch.zeros(sum(GROUPS[:2]), self.decoder.groups, dtype=utterance.codes.dtype)
        for work in self.feed(utterance, "", {"codes": codes, "start": 0}, final=True):
            self.run([work])

    def begin(self, request: StageRequest) -> tuple[Utterance, list[Work]]:
        return self._open(request.request_id), []

    def feed(self, state: Utterance, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Append frames and plan pieces; repeated frames (the stage before it restarted) are dropped by their index.

        Raises `StageFailed` for codes that are missing or out of range.
        """
        if state.complete:
            return []
        self._append(state, payload["codes"], payload["start"])
        works = []
        while (count := GROUPS[min(state.pieces, len(GROUPS) - 1)]) <= len(state.codes):
            works.append(self._plan(state, count))
        if final:
            state.complete = True
            if len(state.codes) or not works:
                works.append(self._plan(state, len(state.codes)))
            works[-1].last = True
        return works

    def run(self, works: list[Work]) -> list[Result]:
        """Decode pieces of one length as one batch."""
        pieces: list[_Piece] = [work.item for work in works]
        self._decode([piece for piece in pieces if piece.payload is None])
        return [Result(piece.payload) for piece in pieces]

    def end(self, state: Utterance) -> None:
        state.complete = True
        state.past = None

    def _open(self, request_id: str) -> Utterance:
        kind = torch.float32 if self.decoder.codebook is None else torch.long
        return Utterance(request_id, torch.empty(0, self.decoder.groups, dtype=kind))

    def _append(self, state: Utterance, codes: Tensor, start: int) -> None:
        if start > state.received:
            raise StageFailed(f"frames {state.received} to {start - 1} of request {state.request_id!r} never came")
        new = codes[state.received - start :].to("cpu", state.codes.dtype)
        if not len(new):
            return
        if list(new.shape[1:]) != [self.decoder.groups]:
            raise StageFailed(f"frames of {list(new.shape[1:])} codes came; the vocoder takes {self.decoder.groups}")
        size = self.decoder.codebook
        if size is not None and len(wrong := new[(new < 0) | (new >= size)]):
            raise StageFailed(f"code {int(wrong[0])} is outside the codebook, which has codes 0 to {size - 1}")
        state.codes = torch.cat([state.codes, new])
        state.received += len(new)

    def _plan(self, state: Utterance, count: int) -> Work:
        piece = _Piece(state, state.codes[:count].T.contiguous(), state.planned)
        state.codes = state.codes[count:]
        bucket = (count, state.planned == 0)
        played_at = state.planned / self._frame_rate
        state.planned += count
        state.pieces += 1
        return Work(state.request_id, piece, bucket=bucket, cost=max(1, count), played_at=played_at)

    def _decode(self, pieces: list[_Piece]) -> None:
        asked = [Piece(piece.codes, piece.first, piece.utterance.past) for piece in pieces]
        if asked and asked[0].codes.shape[1]:
            decoded = self.decoder.decode(asked)
        else:  # an utterance that ended with a piece, or without a frame
            decoded = [(torch.empty(0), piece.utterance.past) for piece in pieces]
        for piece, (samples, past) in zip(pieces, decoded, strict=True):
            utterance = piece.utterance
            piece.payload = {"samples": samples, "start": utterance.samples, "sample_rate": self._rate}
            utterance.past = past
            utterance.samples += len(samples)
