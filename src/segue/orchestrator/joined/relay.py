"""One request over a graph of models: a task for each model waits for what others hand to it, runs its part of the
request, and hands on what it makes.

A model that says text begins with the first words or the first sentence of the model before it; the others need their
whole input. Of a text that a model writes, thoughts and calls of tools do not go on. Each part is an ordinary request:
its result is that of the model served alone, and it recovers as such."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from segue.graph.parts import Link
from segue.messages.deltas import (
    AudioDelta,
    ChoiceEnded,
    ClassesDelta,
    Delta,
    EmbeddingDelta,
    EncodedDelta,
    Finished,
    ImageDelta,
    ModelDelta,
    ProgressDelta,
    RequestMetrics,
    ScoreDelta,
    SegmentDelta,
    TextDelta,
    TurnEnded,
    Usage,
    VideoDelta,
)
from segue.messages.errors import InvalidRequest, SegueError, StageFailed
from segue.messages.request import NOTHING, ArrayInfo, MediaPart, Part, Received, Request, TextPart
from segue.models.shared.dialects.pieces import Parser, Piece, Said
from segue.orchestrator.spoken.passages import Passage, Passages, in_turn

if TYPE_CHECKING:
    from segue.orchestrator.joined.model_graph import Needs, ServedGraph

_UNREAD = 64
"""Deltas that may wait for the client; then the models wait."""
_MODALITY: Mapping[type, str] = {
    TextDelta: "text",
    ChoiceEnded: "text",
    SegmentDelta: "text",
    TurnEnded: "text",
    AudioDelta: "audio",
    ImageDelta: "image",
    VideoDelta: "video",
    EmbeddingDelta: "embedding",
    ScoreDelta: "score",
    ClassesDelta: "classes",
}

Made = str | AudioDelta | ImageDelta
"""What goes over a link."""


async def relayed(graph: ServedGraph, request: Request, needed: Mapping[str, Needs]) -> AsyncGenerator[Delta]:
    """Yield the deltas that the client requested, `Finished` last; the first error of a model ends all. Closing the
    generator cancels the parts of all models."""
    with graph.orchestrator.whole():
        relay = _Relay(graph, request, needed)
        tasks = [asyncio.create_task(relay.run(member)) for member in needed]
        left = len(tasks)
        try:
            while left:
                item = await relay.out.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                    continue
                relay.note(item)
                yield item
            yield relay.finished()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Relay:
    """The state of one request."""

    def __init__(self, graph: ServedGraph, request: Request, needed: Mapping[str, Needs]) -> None:
        self._graph = graph
        self._request = request
        self._needed = needed
        links = [link for link in graph.links if link.target in needed]
        self._made: dict[Link, asyncio.Queue[Made | None]] = {link: asyncio.Queue() for link in links}
        """What has come over each link, and None at its end."""
        self.out: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(_UNREAD)
        """For the client; None: a model is done."""
        self._ends: dict[str, list[Finished]] = {member: [] for member in needed}
        self._began = time.monotonic()
        self._metrics = RequestMetrics()
        self._encoded_seconds = 0.0
        """Audio in the files that are complete."""

    # ── one model ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, member: str) -> None:
        """Run the part of one model to its end."""
        try:
            await self._run(member)
        except Exception as error:  # the client gets it
            await self.out.put(error)
        else:
            await self.out.put(None)

    async def _run(self, member: str) -> None:
        sources = [link for link in self._made if link.target == member]
        if len(sources) == 1 and sources[0].carries == "text" and self._graph.speaks(member):
            deltas = self._say(member, sources[0])
        else:
            received = [Received(link.source, await self._whole(link), link.transform) for link in sources]
            part = self._graph.part(self._request, member, self._needed[member], received=received)
            deltas = self._graph.models[member].stream(part)
        parser = self._parser(member)
        async with aclosing(deltas):
            async for own in deltas:
                delta = self._graph.named(member, own)
                if isinstance(delta, TextDelta):
                    self._hand_on_text(member, parser.feed(delta.text) if delta.index == 0 else [])
                elif isinstance(delta, AudioDelta | ImageDelta):
                    self._hand_on(member, delta)
                await self._give(member, delta)
        self._hand_on_text(member, parser.finish())
        for link, made in self._made.items():
            if link.source == member:
                made.put_nowait(None)

    def _parser(self, member: str) -> Parser:
        """Return the parser of what a model writes."""
        chat = self._request.chat if member == self._graph.main else None
        dialect = self._graph.models[member].card.dialect
        tools = frozenset(tool["function"]["name"] for tool in chat.tools) if chat is not None else frozenset[str]()
        opened = dialect.begins_in_thought(chat.template_kwargs if chat is not None else {})
        return dialect.parser(opened=opened, tools=tools or None)

    def _hand_on_text(self, member: str, pieces: list[Piece]) -> None:
        if text := "".join(piece.text for piece in pieces if isinstance(piece, Said)):
            self._hand_on(member, text)

    def _hand_on(self, member: str, made: Made) -> None:
        kind = "text" if isinstance(made, str) else _MODALITY[type(made)]
        for link, queue in self._made.items():
            if link.source == member and link.carries == kind:
                queue.put_nowait(made)

    async def _give(self, member: str, delta: Delta) -> None:
        """Give the client what it requested of a model."""
        needs = self._needed[member]
        if isinstance(delta, Finished):
            self._ends[member].append(delta)
            self._metrics.spans += self._spans(delta)
        modality = delta.kind if isinstance(delta, EncodedDelta) else _MODALITY.get(type(delta))
        if modality in needs.plain or (isinstance(delta, ProgressDelta) and needs.plain):
            await self.out.put(delta)
        if isinstance(delta, TextDelta | AudioDelta | ImageDelta):
            if modality in needs.named:
                await self.out.put(ModelDelta(member, delta))
        elif isinstance(delta, Finished) and needs.named:
            await self.out.put(ModelDelta(member, delta))

    # ── what a model gets ──────────────────────────────────────────────────────────────────────────────────────────

    async def _whole(self, link: Link) -> Part:
        """Return all that comes over a link, as one part. Raises `StageFailed` if nothing did but had to."""
        made = []
        while (piece := await self._made[link].get()) is not None:
            made.append(piece)
        if link.carries == "text":
            return TextPart("".join(piece for piece in made if isinstance(piece, str)))
        sounds = [piece for piece in made if isinstance(piece, AudioDelta)]
        if sounds:
            samples = b"".join(piece.samples for piece in sounds)
            info = ArrayInfo("float32", (len(samples) // 4,), sounds[0].sample_rate)
            return MediaPart("audio", samples, info, field=link.source)
        images = [piece for piece in made if isinstance(piece, ImageDelta) and piece.partial is None]
        if not images:
            raise StageFailed(f"model {link.source!r} made no {link.carries} for {link.target!r}")
        image = images[0]
        return MediaPart("image", image.data, ArrayInfo("uint8", (image.height, image.width, 3)), field=link.source)

    async def _say(self, member: str, link: Link) -> AsyncGenerator[Delta]:
        """Say the text of a link while it arrives: as it goes on if the model can and there is no transform, else
        sentence by sentence."""
        says = self._graph.models[member].card.says
        goes_on = says is not None and says.appends and not link.transform
        passages, numbers = Passages(goes_on=goes_on), count()

        async def arrive() -> None:
            try:
                while (piece := await self._made[link].get()) is not None:
                    assert isinstance(piece, str), "a link carries one modality"
                    passages.feed(piece)
                passages.finish()
            except SegueError as error:
                passages.fail(error)

        arriving = asyncio.create_task(arrive())
        try:
            said = in_turn(passages.begun(), lambda passage: self._said(member, link, passage, next(numbers), goes_on))
            form = self._request.formats.get("audio")
            joined = in_base64(said) if form is not None and form.base64 and form.whole else said
            async with aclosing(said), aclosing(joined):
                async for delta in joined:
                    yield delta
        finally:
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)

    async def _said(
        self, member: str, link: Link, passage: Passage, number: int, goes_on: bool
    ) -> AsyncGenerator[Delta]:
        """Yield the deltas of one passage; none if the transform leaves nothing of it."""
        model = self._graph.models[member]
        async with aclosing(passage.pieces()) as pieces:
            text = await anext(pieces) if goes_on else "".join([piece async for piece in pieces])
            received = [Received(link.source, TextPart(text), link.transform)]
            needs = self._needed[member]
            part = self._graph.part(self._request, member, needs, received=received, number=number)
            try:
                deltas = model.stream_appended(part, pieces) if goes_on else model.stream(part)
                async with aclosing(deltas):
                    async for delta in deltas:
                        yield delta
            except InvalidRequest as error:
                if error.field != NOTHING:
                    raise

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self, delta: Delta) -> None:
        """Note when the client gets its first text and audio."""
        now = time.monotonic() - self._began
        if isinstance(delta, TextDelta) and self._metrics.ttft is None:
            self._metrics.ttft = now
        elif isinstance(delta, AudioDelta):
            self._metrics.ttfa = now if self._metrics.ttfa is None else self._metrics.ttfa
            self._metrics.audio_seconds += len(delta.samples) / 4 / delta.sample_rate
        elif isinstance(delta, EncodedDelta) and delta.kind == "audio":
            self._metrics.ttfa = now if self._metrics.ttfa is None else self._metrics.ttfa
            self._metrics.audio_seconds = self._encoded_seconds + delta.facts["seconds"]
            if delta.last:  # another file may follow, which is joined with it
                self._encoded_seconds = self._metrics.audio_seconds

    def _spans(self, ended: Finished) -> list[tuple[str, str, float, float]]:
        """Return the timeline of a part, counted from the start of the request."""
        start = time.monotonic() - self._began - ended.metrics.jct
        return [(stage, phase, begin + start, end + start) for stage, phase, begin, end in ended.metrics.spans]

    def finished(self) -> Finished:
        """Return the last delta: the end is that of the main model, or of the last one."""
        main = self._graph.main if self._ends.get(self._graph.main) else next(reversed(self._ends))
        ends = [end for member in self._ends.values() for end in member]
        last = self._ends[main][-1:]
        self._metrics.jct = time.monotonic() - self._began
        self._metrics.attempts = 1 + sum(end.metrics.attempts - 1 for end in ends)
        token_ids: dict[str, list[int]] = {}
        for end in ends:
            for stage, ids in end.token_ids.items():
                token_ids[stage] = token_ids.get(stage, []) + ids
        made = Counter[str]()
        for member, needs in self._needed.items():
            if needs.plain:
                for end in self._ends[member]:
                    made.update(end.usage.completion_modalities)
        usage = Usage(completion_modalities=dict(made))
        for end in last:
            usage = msgspec.structs.replace(end.usage, completion_modalities=dict(made))
        return Finished(
            finish_reason=last[0].finish_reason if last else "stop",
            token_ids=token_ids,
            usage=usage,
            metrics=self._metrics,
            choices=last[0].choices if last and self._needed[main].plain else [],
        )


async def in_base64(deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    """Encode files that are joined into one, as one text of base64.

    Only here, because a file's end moves the borders in all that follows; a client that streams decodes each piece.
    """
    rest, last = b"", None
    async for delta in deltas:
        if not isinstance(delta, EncodedDelta):
            yield delta
            continue
        data = rest + delta.data
        whole = len(data) - len(data) % 3
        rest, last = data[whole:], delta
        yield msgspec.structs.replace(delta, data=base64.b64encode(data[:whole]))
    if last is not None:
        facts = {**last.facts, "seconds": 0.0}
        yield msgspec.structs.replace(last, data=base64.b64encode(rest), last=True, facts=facts)
