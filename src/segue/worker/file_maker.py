"""The output stage's model: makes the files of clients that ask for a file instead of samples.

Its input is the output of the stages that give a modality (`StageRunner.for_output`), its output `EncodedDelta`s. A
file's bytes depend only on the units that are in it, not on how they are split: a new attempt of this stage makes the
same bytes from the payloads that its upstreams kept, and a new attempt of an upstream goes on where the last one was
lost. No torch operator runs here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.media.audio_file import AudioFile
from segue.messages.deltas import EncodedDelta
from segue.messages.formats import FORMATS, Format

_SILENCE_RATE = 24_000
"""Samples per second of a whole file without samples."""


@dataclass(slots=True)
class _File:
    """A file that is being made."""

    stage: str
    kind: str
    output: int
    encoder: AudioFile
    mime: str
    facts: dict[str, int | float]
    sent: int = 0
    """Units of `EncodedDelta` so far."""

    def feed(self, samples: torch.Tensor) -> EncodedDelta | None:
        self.facts["seconds"] += len(samples) / self.facts["sample_rate"]
        data = self.encoder.feed(samples.numpy())
        return self._delta(data, last=False) if data else None

    def finish(self) -> EncodedDelta:
        return self._delta(self.encoder.finish(), last=True)

    def _delta(self, data: bytes, *, last: bool) -> EncodedDelta:
        made = EncodedDelta(
            self.stage, self.kind, self.output, self.sent, self.mime, data, last=last, facts=dict(self.facts)
        )
        self.sent = made.end
        return made


@dataclass(slots=True)
class _Making:
    """The files of one request."""

    request: StageRequest
    open: set[str]
    """Upstreams that have not ended."""
    have: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """(stage, kind, output) → units that have arrived."""
    files: dict[tuple[str, str, int], _File] = field(default_factory=dict)

    def file(self, stage: str, kind: str, output: int, rate: int) -> _File:
        """Return the file of an output, begun if this is its first piece."""
        key = (stage, kind, output)
        if key not in self.files:
            form = self._format(kind)
            facts: dict[str, int | float] = {"sample_rate": rate, "seconds": 0.0}
            self.files[key] = _File(*key, AudioFile(form, rate), FORMATS[kind][form.name], facts)
        return self.files[key]

    def _format(self, kind: str) -> Format:
        return self.request.request.formats[kind]

    def empty(self) -> list[_File]:
        """Return the files that exist even without samples."""
        if self.files or "audio" not in self.request.to_client or not self._format("audio").whole:
            return []
        return [self.file(min(self.request.upstreams), "audio", 0, _SILENCE_RATE)]


@dataclass(slots=True)
class _Piece:
    """One work item: units for a file, or (`part` None) the end of all files."""

    making: _Making
    upstream: str
    part: Payload | None


class FileMaker:
    """A `ModuleModel`."""

    def __init__(self, ctx: LoadContext) -> None:
        ctx.progress(1.0, "nothing to load")

    def warm_up(self) -> None:
        """Encode a moment of silence, which loads the codecs."""
        for name in FORMATS["audio"]:
            AudioFile(Format(name=name, whole=True), _SILENCE_RATE).finish()

    def begin(self, request: StageRequest) -> tuple[_Making, list[Work]]:
        return _Making(request, set(request.upstreams)), []

    def feed(self, state: _Making, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Return one item for every chunk, even if it has nothing new: the engine tells by its items which chunks it
        has used."""
        works = [self._work(state, upstream, self._fresh(state, upstream, payload))]
        if final:
            state.open.discard(upstream)
            if not state.open:
                works.append(self._work(state, "", None, last=True))
        return works

    def run(self, works: list[Work]) -> list[Result]:
        return [self._made(work.item) for work in works]

    def end(self, state: _Making) -> None:
        state.files.clear()

    @staticmethod
    def _fresh(state: _Making, upstream: str, payload: Payload) -> Payload:
        """Return a payload without the units that have arrived, from an earlier attempt of its stage."""
        if not payload:
            return payload
        key = (upstream, payload["kind"], payload["output"])
        start, data, have = payload["start"], payload["data"], state.have.get(key, 0)
        state.have[key] = max(have, start + len(data))
        return {**payload, "data": data[max(0, have - start) :]}

    @staticmethod
    def _work(state: _Making, upstream: str, part: Payload | None, *, last: bool = False) -> Work:
        # its own bucket: a call has one item, so that the first bytes of one client wait for one item of another
        request_id = state.request.request_id
        return Work(request_id, _Piece(state, upstream, part), bucket=request_id, last=last)

    @staticmethod
    def _made(piece: _Piece) -> Result:
        making, part = piece.making, piece.part
        deltas: list[EncodedDelta | None] = []
        if part is None:
            deltas = [one.finish() for one in (*making.files.values(), *making.empty())]
        elif part and len(part["data"]):
            file = making.file(piece.upstream, part["kind"], part["output"], part["sample_rate"])
            deltas = [file.feed(part["data"])]
        made: dict[str, Any] = {"deltas": [delta for delta in deltas if delta is not None]}
        return Result(made)
