"""One request over a graph of models: a task for each visit of a model waits for what others hand to it, runs its part
of the request, and hands on what it makes.

A model that says text begins with the first words or the first sentence of the model before it; the others need their
whole input. Where an edge returns, `Course` says which models are visited again. Of a text that a model writes,
thoughts and calls of tools do not go on. Each part is an ordinary request: its result is that of the model served
alone, and it recovers as such."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from segue.graph.course import Course
from segue.graph.parts import Link, Outcome, number_of, stage_of
from segue.messages.deltas import (
    AudioDelta,
    Choice,
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
from segue.models.shared.dialects.pieces import Parser, ReplyPiece, Said
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
        deltas = relay.deltas()
        joined = in_base64(deltas) if relay.encodes else deltas
        try:
            async with aclosing(deltas), aclosing(joined):
                async for delta in joined:
                    yield delta
            yield relay.finished()
        finally:
            await relay.cancel()


class _Relay:
    """The state of one request. Its visits (`Course`) are those of places; each runs in a task of its own."""

    def __init__(self, graph: ServedGraph, request: Request, needed: Mapping[str, Needs]) -> None:
        self._graph = graph
        self._request = request
        self._needed = needed
        self._links = [link for link in graph.links if link.source in needed and link.target in needed]
        self._revises = any(link.revises for link in self._links)
        self._course = Course(graph.walk(needed))
        self._made: dict[tuple[Link, str], asyncio.Queue[Made | None]] = {}
        """What has come over each link from a visit, and None at its end."""
        self._last: dict[int, asyncio.Future[bool]] = {}
        """Number of a visit → whether it is the last, or no more is known; if loops revise."""
        self._talk: list[Received] = []
        """What the model that loops return to has got and written."""
        self._numbers: dict[str, Iterator[int]] = {}
        """Of the files that are joined to one of a place, or of a visit."""
        self._out: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(_UNREAD)
        """For the client; None: a visit is over."""
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: dict[str, list[Finished]] = {}
        """By visit."""
        self._began = time.monotonic()
        self._metrics = RequestMetrics()
        self._encoded_seconds = 0.0
        """Audio in the files that are complete."""
        form = request.formats.get("audio")
        speakers = [place for place, needs in needed.items() if "audio" in needs.plain and self._joins(place)]
        self.encodes = form is not None and form.base64 and form.whole and bool(speakers)
        """Whether files of audio are joined in one text of base64."""

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield all deltas but the last."""
        self._begin()
        ended = 0
        while ended < len(self._tasks):
            item = await self._out.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                ended += 1
                continue
            self._note(item)
            yield item
        assert self._course.over, "all that began has ended, so nothing more begins"

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── visits ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Begin the visits that can begin now."""
        for visit in self._course.advance():
            for link in self._links:
                if link.source == stage_of(visit):
                    self._made[link, visit] = asyncio.Queue()
            self._tasks.append(asyncio.create_task(self._run(visit)))
        for number in range(self._course.last + 1):
            last = self._is_last(number)
            if not last.done() and (number < self._course.last or self._course.spent):
                last.set_result(number == self._course.last)

    def _is_last(self, number: int) -> asyncio.Future[bool]:
        if number not in self._last:
            self._last[number] = asyncio.get_running_loop().create_future()
        return self._last[number]

    def _known_last(self, number: int) -> bool:
        last = self._is_last(number)
        return last.done() and last.result()

    def _revised(self, place: str) -> bool:
        """Whether later visits of a place replace the earlier ones."""
        return self._revises and place in self._course.again

    def _joins(self, place: str) -> bool:
        """Whether the audio of a place is made in parts."""
        said = self._graph.speaks(place) and any(link.target == place for link in self._links)
        return said or (place in self._course.again and not self._revises)

    async def _run(self, visit: str) -> None:
        """Make a visit, and begin those that follow from it."""
        place, number = stage_of(visit), number_of(visit)
        try:
            if self._revised(place) and place not in self._course.returning and not await self._is_last(number):
                self._course.forgo(visit)
                self._begin()
            else:
                held: list[Delta] = []
                outcome = await self._make(visit, held)
                self._course.end(visit, outcome, self._request)
                self._begin()
                if held and await self._is_last(number):
                    await self._send(held)
        except Exception as error:  # the client gets it
            await self._out.put(error)
        else:
            await self._out.put(None)

    async def _make(self, visit: str, held: list[Delta]) -> Outcome:
        """Run a visit's part of the request to its end. `held`: what the client gets only if no visit follows."""
        place = stage_of(visit)
        parser, said = self._parser(place), list[str]()
        deltas = await self._begun(visit)
        async with aclosing(deltas):
            async for own in deltas:
                delta = self._graph.named(place, own)
                if isinstance(delta, TextDelta):
                    said += self._hand_on_text(visit, parser.feed(delta.text) if delta.index == 0 else [])
                elif isinstance(delta, AudioDelta | ImageDelta):
                    self._hand_on(visit, delta)
                await self._give(visit, delta, held)
        said += self._hand_on_text(visit, parser.finish())
        for made in self._leaving(visit):
            made.put_nowait(None)
        text = "".join(said)
        if place == self._course.head and self._graph.converses(place):
            self._talk.append(Received(place, TextPart(text), visit=number_of(visit), own=True))
        return self._outcome(visit, text)

    async def _begun(self, visit: str) -> AsyncGenerator[Delta]:
        """Start the part of a visit as soon as it has the input that it begins with."""
        place, number = stage_of(visit), number_of(visit)
        sources = [
            (link, source) for link, source in self._made
            if link.target == place and source in self._course.begun[visit]
        ]  # fmt: skip
        if len(sources) == 1 and sources[0][0].carries == "text" and self._graph.speaks(place):
            return self._say(visit, *sources[0])
        received = [
            Received(link.source, await self._whole(link, self._made[link, source]), link.transform, number)
            for link, source in sources
        ]
        goes_on = place == self._course.head and self._graph.converses(place)
        if goes_on:
            self._talk += received
            received = list(self._talk)
        part = self._graph.part(
            self._request,
            place,
            self._needed[place],
            visit=number,
            received=received,
            number=self._number(visit) if self._joins(place) else None,
            entry=place in self._graph.entries and (number == 0 or goes_on),
        )
        return self._graph.models[place].stream(part)

    def _number(self, visit: str) -> int:
        """Return the next number of a part of an audio file."""
        file = visit if self._revises else stage_of(visit)
        return next(self._numbers.setdefault(file, count()))

    def _outcome(self, visit: str, text: str) -> Outcome:
        end = self._ends[visit][-1] if visit in self._ends else None
        choice = end.choices[0] if end is not None and end.choices else None
        return Outcome(
            visit=number_of(visit),
            finish_reason="" if end is None else end.finish_reason,
            stop_reason=None if choice is None else choice.stop_reason,
            token_ids=() if choice is None else tuple(choice.token_ids),
            text=text,
        )

    def _parser(self, member: str) -> Parser:
        """Return the parser of what a model writes."""
        chat = self._request.chat if member == self._graph.main else None
        dialect = self._graph.models[member].card.dialect
        tools = frozenset(tool["function"]["name"] for tool in chat.tools) if chat is not None else frozenset[str]()
        opened = dialect.begins_in_thought(chat.template_kwargs if chat is not None else {})
        return dialect.parser(opened=opened, tools=tools or None)

    def _hand_on_text(self, visit: str, pieces: list[ReplyPiece]) -> list[str]:
        """Hand on what a model says. Returns it."""
        said = [piece.text for piece in pieces if isinstance(piece, Said) and piece.text]
        for text in said:
            self._hand_on(visit, text)
        return said

    def _hand_on(self, visit: str, made: Made) -> None:
        kind = "text" if isinstance(made, str) else _MODALITY[type(made)]
        for queue in self._leaving(visit, kind):
            queue.put_nowait(made)

    def _leaving(self, visit: str, kind: str | None = None) -> list[asyncio.Queue[Made | None]]:
        """What leaves a visit over the links that carry this kind, or over all."""
        return [
            queue for (link, source), queue in self._made.items() if source == visit and kind in (None, link.carries)
        ]

    async def _give(self, visit: str, delta: Delta, held: list[Delta]) -> None:
        """Give the client what it requested of a visit."""
        place = stage_of(visit)
        needs = self._needed[place]
        if isinstance(delta, Finished):
            self._ends.setdefault(visit, []).append(delta)
            self._metrics.spans += self._spans(delta)
        modality = delta.kind if isinstance(delta, EncodedDelta) else _MODALITY.get(type(delta))
        filed = modality in self._request.formats and not isinstance(delta, EncodedDelta)
        if (modality in needs.plain and not filed) or (isinstance(delta, ProgressDelta) and needs.plain):
            held.append(self._placed(visit, delta))
            if not self._revised(place) or self._known_last(number_of(visit)):
                await self._send(held)
        name = place if self._revised(place) and place not in self._course.returning else visit
        if isinstance(delta, TextDelta | AudioDelta | ImageDelta):
            if modality in needs.named:
                await self._out.put(ModelDelta(name, delta))
        elif isinstance(delta, Finished) and needs.named:
            await self._out.put(ModelDelta(name, delta))

    def _placed(self, visit: str, delta: Delta) -> Delta:
        """Number the images and videos of a later visit after those of the visits before."""
        if self._revises or not isinstance(delta, ImageDelta | VideoDelta | EncodedDelta | ProgressDelta):
            return delta
        if isinstance(delta, EncodedDelta) and delta.kind == "audio":
            return delta  # one file of all visits
        asked = self._request.diffusion
        each = (asked.num_images_per_prompt if asked is not None else None) or 1
        return msgspec.structs.replace(delta, index=delta.index + number_of(visit) * each)

    async def _send(self, held: list[Delta]) -> None:
        while held:
            await self._out.put(held.pop(0))

    # ── what a model gets ──────────────────────────────────────────────────────────────────────────────────────────

    async def _whole(self, link: Link, made: asyncio.Queue[Made | None]) -> Part:
        """Return all that comes over a link, as one part. Raises `StageFailed` if nothing did but had to."""
        pieces = []
        while (piece := await made.get()) is not None:
            pieces.append(piece)
        if link.carries == "text":
            return TextPart("".join(piece for piece in pieces if isinstance(piece, str)))
        sounds = [piece for piece in pieces if isinstance(piece, AudioDelta)]
        if sounds:
            samples = b"".join(piece.samples for piece in sounds)
            info = ArrayInfo("float32", (len(samples) // 4,), sounds[0].sample_rate)
            return MediaPart("audio", samples, info, field=link.source)
        images = [piece for piece in pieces if isinstance(piece, ImageDelta) and piece.partial is None]
        if not images:
            raise StageFailed(f"model {link.source!r} made no {link.carries} for {link.target!r}")
        image = images[0]
        return MediaPart("image", image.data, ArrayInfo("uint8", (image.height, image.width, 3)), field=link.source)

    async def _say(self, visit: str, link: Link, source: str) -> AsyncGenerator[Delta]:
        """Say the text of a link while it arrives: as it goes on if the model can and there is no transform, else
        sentence by sentence."""
        says = self._graph.models[stage_of(visit)].card.says
        goes_on = says is not None and says.appends and not link.transform
        passages = Passages(goes_on=goes_on)

        async def arrive() -> None:
            try:
                while (piece := await self._made[link, source].get()) is not None:
                    assert isinstance(piece, str), "a link carries one modality"
                    passages.feed(piece)
                passages.finish()
            except SegueError as error:
                passages.fail(error)

        arriving = asyncio.create_task(arrive())
        try:
            said = in_turn(
                passages.begun(), lambda passage: self._said(visit, link, passage, self._number(visit), goes_on)
            )
            async with aclosing(said):
                async for delta in said:
                    yield delta
        finally:
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)

    async def _said(
        self, visit: str, link: Link, passage: Passage, number: int, goes_on: bool
    ) -> AsyncGenerator[Delta]:
        """Yield the deltas of one passage; none if the transform leaves nothing of it."""
        place = stage_of(visit)
        model, needs = self._graph.models[place], self._needed[place]
        async with aclosing(passage.pieces()) as pieces:
            text = await anext(pieces) if goes_on else "".join([piece async for piece in pieces])
            received = [Received(link.source, TextPart(text), link.transform)]
            part = self._graph.part(
                self._request, place, needs, visit=number_of(visit), received=received, number=number, entry=False
            )
            try:
                deltas = model.stream_appended(part, pieces) if goes_on else model.stream(part)
                async with aclosing(deltas):
                    async for delta in deltas:
                        yield delta
            except InvalidRequest as error:
                if error.field != NOTHING:
                    raise

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _note(self, delta: Delta) -> None:
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
        kept = [visit for visit in self._ends if not self._revised(stage_of(visit)) or self._newest(visit)]
        place = self._graph.main
        if not any(stage_of(visit) == place for visit in kept):
            place = list(self._needed)[-1]
        ends = [end for visit in kept if stage_of(visit) == place for end in self._ends[visit]]
        self._metrics.jct = time.monotonic() - self._began
        made, token_ids = Counter[str](), dict[str, list[int]]()
        for visit, parts in self._ends.items():
            for end in parts:
                self._metrics.attempts += end.metrics.attempts - 1
                if self._needed[stage_of(visit)].plain:
                    made.update(end.usage.completion_modalities)
                for stage, ids in end.token_ids.items() if visit in kept else ():
                    token_ids[stage] = token_ids.get(stage, []) + ids
        usage = ends[-1].usage if ends else Usage()
        reason = ends[-1].finish_reason if ends else "stop"
        choices = self._choices(place, ends)
        if self._course.stopped_by is not None:
            reason, stop = "length", f"the bound of edge {self._course.stopped_by}"
            choices = [msgspec.structs.replace(one, finish_reason=reason, stop_reason=stop) for one in choices]
        return Finished(
            finish_reason=reason,
            token_ids=token_ids,
            usage=msgspec.structs.replace(usage, completion_modalities=dict(made)),
            metrics=self._metrics,
            choices=choices,
        )

    def _newest(self, visit: str) -> bool:
        return number_of(visit) == self._course.last

    def _choices(self, place: str, ends: list[Finished]) -> list[Choice]:
        """The outputs of the main model. Those of several visits are one."""
        if not ends or not self._needed[place].plain:
            return []
        several = [end.choices[0] for end in ends if end.choices]
        if place not in self._course.again or len(several) < 2:
            return ends[-1].choices
        logprobs = [one.cumulative_logprob for one in several if one.cumulative_logprob is not None]
        return [
            msgspec.structs.replace(
                several[-1],
                token_ids=[token for one in several for token in one.token_ids],
                cumulative_logprob=sum(logprobs) if len(logprobs) == len(several) else None,
            )
        ]


async def in_base64(deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    """Encode files of audio that are joined into one, as one text of base64.

    Only here, because a file's end moves the borders in all that follows; a client that streams decodes each piece.
    """
    rest, last = b"", None
    async for delta in deltas:
        if not isinstance(delta, EncodedDelta) or delta.kind != "audio":
            yield delta
            continue
        data = rest + delta.data
        whole = len(data) - len(data) % 3
        rest, last = data[whole:], delta
        yield msgspec.structs.replace(delta, data=base64.b64encode(data[:whole]))
    if last is not None:
        facts = {**last.facts, "seconds": 0.0}
        yield msgspec.structs.replace(last, data=base64.b64encode(rest), last=True, facts=facts)
