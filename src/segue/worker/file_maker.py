"""The output stage's model: makes the files of clients that ask for files instead of samples and pixels.

Its input is the output of the stages that give a modality (`deltas.file_parts`), its output `EncodedDelta`s. A new
attempt of this stage makes the same bytes from the payloads that its upstreams kept, and a new attempt of an upstream
goes on where the last one was lost (`segue.media.files`). No torch operator runs here.
"""

from __future__ import annotations

from dataclasses import dataclass

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.engines.module.contract import Result, Work
from segue.media.audio_file import AudioFile
from segue.media.files import SILENCE_RATE, FileSet, Part
from segue.messages.deltas import EncodedDelta
from segue.messages.formats import FORMATS, Format


@dataclass(slots=True)
class _Making:
    """The files of one request."""

    request: StageRequest
    files: FileSet
    open: set[str]
    """Upstreams that have not ended."""


@dataclass(slots=True)
class _Item:
    """A part of a chunk, if it has one; the last item is the end of the files."""

    making: _Making
    upstream: str
    part: Part | None
    last: bool = False


class FileMaker:
    """A `ModuleModel`."""

    def __init__(self, ctx: LoadContext) -> None:
        ctx.progress(1.0, "nothing to load")

    def warm_up(self) -> None:
        """Encode a moment of silence, which loads the codecs."""
        for name in FORMATS["audio"]:
            AudioFile(Format(name=name, whole=True), SILENCE_RATE).finish()

    def begin(self, request: StageRequest) -> tuple[_Making, list[Work]]:
        return _Making(request, FileSet(request.request.formats), set(request.upstreams)), []

    def feed(self, state: _Making, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        """Return an item for every chunk, even if it has nothing new: the engine tells by its items which chunks it has
        used."""
        fresh = [state.files.fresh(upstream, part) for part in payload.get("parts", ())]
        items = [_Item(state, upstream, part) for whole in fresh for part in state.files.split(whole)]
        items = items or [_Item(state, upstream, None)]
        if final:
            state.open.discard(upstream)
            items[-1].last = not state.open
        # its own bucket: a call has one item, so that the first bytes of one client wait for one item of another
        request_id = state.request.request_id
        return [Work(request_id, item, bucket=request_id, last=item.last) for item in items]

    def run(self, works: list[Work]) -> list[Result]:
        return [Result({"deltas": self._made(work.item)}) for work in works]

    def end(self, state: _Making) -> None:
        state.files.close()

    @staticmethod
    def _made(item: _Item) -> list[EncodedDelta]:
        files = item.making.files
        made = [] if item.part is None else files.feed(item.upstream, item.part)
        return made + files.finish(sorted(item.making.request.upstreams)) if item.last else made
