"""A served graph of models: which of them a request needs, and what each gets of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import msgspec

from segue.graph.checks import reachable
from segue.graph.deployment.deployment import Plan
from segue.graph.parts import TOKENS, Link, full_name, member_of, own_name, visit_name
from segue.graph.walk import Walk, WalkStage
from segue.messages.deltas import Delta, Finished
from segue.messages.errors import InvalidRequest, nearest, wrong
from segue.messages.formats import Format, check_formats
from segue.messages.request import Appended, ChatOptions, MediaPart, Message, Part, Received, Request
from segue.messages.sampling import SamplingParams, turn_seed
from segue.messages.wire import StageFacts
from segue.models.model_graph import Models
from segue.models.shared.diffusion.sizes import Sizes
from segue.orchestrator.joined.relay import relayed
from segue.orchestrator.orchestrator import Orchestrator
from segue.orchestrator.requests.kept import check_kept
from segue.orchestrator.requests.open_request import OpenRequest
from segue.orchestrator.served import ServedModel, check_names
from segue.orchestrator.service import ModelCard


@dataclass(slots=True)
class Needs:
    """What a request needs of one model."""

    plain: set[str] = field(default_factory=set)
    """Modalities that the client gets as the output."""
    named: set[str] = field(default_factory=set)
    """Modalities that it requested by the model's name."""
    handed: set[str] = field(default_factory=set)
    """Modalities that go to other models."""

    @property
    def modalities(self) -> list[str]:
        return sorted(self.plain | self.named | self.handed)


class ServedGraph:
    """`Served`, over several models."""

    def __init__(
        self, name: str, models: Models, served: Mapping[str, ServedModel], plan: Plan, orchestrator: Orchestrator
    ) -> None:
        self.places = models.places
        self.models = {place: served[model] for place, model in self.places.items()}
        """By place, in topological order."""
        self.links: tuple[Link, ...] = models.graph.links
        self.orchestrator = orchestrator
        self.main = models.main
        self._givers = models.givers
        self._plan = plan
        self.takes = {place: models.members[model].takes for place, model in self.places.items()}
        fed = {link.target for link in self.links if link.most is None}
        self.entries = [place for place in self.places if place not in fed]
        """The places that take the client's request."""
        forward = {one: [link.target for link in self.links if link.source == one] for one in self.places}
        self._again = frozenset().union(*(reachable(link.target, forward) for link in self.links if link.most))
        """The places that a request may visit again."""
        self.card = _card(name, self, models.givers, plan)

    @property
    def chats(self) -> bool:
        return self.models[self.entries[0]].chats

    @property
    def open_options(self) -> bool:
        return any(model.open_options for model in self.models.values())

    @property
    def sizes(self) -> Sizes | None:
        return next((model.sizes for model in self.models.values() if model.sizes is not None), None)

    @property
    def images(self) -> bool:
        return any(model.images for model in self.models.values())

    def learn(self, facts: Mapping[str, StageFacts]) -> None:
        for place, model in self.models.items():
            model.learn(facts)
            self.card.vocab_sizes |= {at(place, stage): size for stage, size in model.card.vocab_sizes.items()}
        speaker = self._givers.get("audio")
        self.card.voices = self.models[speaker].card.voices if speaker is not None else []
        self.card.max_model_len = self.models[self.main].card.max_model_len

    def check(self, request: Request) -> None:
        for member, needs in self._needs(request).items():
            self.models[member].check(self.part(request, member, needs))

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        if request.modalities == [TOKENS]:  # the prompt of the model that writes
            needs = Needs({TOKENS})
            return self.models[self.main].stream(self.part(request, self.main, needs, entry=True))
        needed = self._needs(request)
        for member, needs in needed.items():
            self.models[member].check_request(self.part(request, member, needs))
        if request.deadline is None and (seconds := self._plan.limits.default_deadline) is not None:
            request.deadline = time.time() + seconds
        if request.seed is None:
            request.seed = secrets.randbits(63)
        return relayed(self, request, needed)

    def open(self, request: Request, *, reply: bool) -> OpenRequest:
        raise InvalidRequest(f"{self.card.name} takes its whole input at once", field="open")

    def stream_appended(self, request: Request, pieces: AsyncGenerator[str | Appended]) -> AsyncGenerator[Delta]:
        raise InvalidRequest(f"{self.card.name} takes its whole input at once", field="open")

    def speaks(self, member: str) -> bool:
        """Whether a model says the text that it gets, and does nothing else."""
        card = self.models[member].card
        return card.says is not None and "text" not in card.gives

    def converses(self, place: str) -> bool:
        """Whether a model that is returned to goes on from what it wrote: a transcript, e.g., is not gone on with."""
        card = self.models[place].card
        return card.text_stage is not None and "text" in card.gives and card.speech is None

    def walk(self, needed: Mapping[str, Needs]) -> Walk:
        """Return the walk of a request over the places of the graph."""
        links = [link for link in self.links if link.source in needed and link.target in needed]
        return {
            place: WalkStage(
                upstreams=frozenset(one.source for one in links if one.target == place and one.most is None),
                downstreams=frozenset(one.target for one in links if one.source == place and one.most is None),
                to_client=frozenset(needs.plain | needs.named),
                on={one.target: one.on for one in links if one.source == place and one.on is not None},
                returns={one.target: one.most for one in links if one.source == place and one.most is not None},
            )
            for place, needs in needed.items()
        }

    def part(
        self,
        request: Request,
        member: str,
        needs: Needs,
        *,
        visit: int = 0,
        received: list[Received] | None = None,
        number: int | None = None,
        entry: bool | None = None,
    ) -> Request:
        """Return the part of a request that is for a visit of the model at a place (`member`). `received`: what it gets
        from others; `number`: which of its generations this is, if there are several; `entry`: whether it takes the
        client's messages."""
        card = self.models[member].card
        entry = member in self.entries if entry is None else entry
        own = {at(member, stage): stage for stage in card.sampling_stages}
        sampling = {own[stage]: params for stage, params in request.sampling.items() if stage in own}
        others = self.card.options - card.options if self.models[member].open_options else frozenset[str]()
        options = {
            name: value
            for name, value in request.options.items()
            if name in card.options or (self.models[member].open_options and name not in others)
        }
        if card.says is not None and self.speaks(member):
            options = {**card.says.options, **options}
            usual = card.says.sampling
            sampling |= {stage: sampling.get(stage, SamplingParams()).over(usual[stage]) for stage in usual}
        if visit:
            sampling = {stage: _again(params, visit) for stage, params in sampling.items()}
        part = msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}.{visit_name(member, visit)}" + ("" if number is None else f"-{number}"),
            member=self.places[member],
            received=received or [],
            chat=_chat(request.chat, visit) if member == self.main else ChatOptions(),
            seed=turn_seed(request.seed, visit) if request.seed is not None and visit else request.seed,
            modalities=needs.modalities,
            voice=request.voice if "audio" in card.gives and member == self._givers.get("audio") else None,
            sampling=sampling,
            diffusion=request.diffusion if self.models[member].images else None,
            adapter=request.adapter if request.adapter in card.adapters else None,
            return_prompt_ids=request.return_prompt_ids and member == self.main and not visit,
            formats=_formats(request, needs, number),
            raw=sorted(request.formats.keys() & needs.plain & (needs.handed | needs.named)),
            options=options,
        )
        if not entry:
            return msgspec.structs.replace(
                part, messages=[], prompt=None, prompt_token_ids=None, prompt_embeds=None, add_special_tokens=None
            )
        if len(self.entries) > 1:
            part.messages = self._messages_for(request, member)
        return part

    def named(self, place: str, delta: Delta) -> Delta:
        """Return a delta of the model at a place with the names that its stages have there."""
        if place == self.places[place]:
            return delta
        if isinstance(delta, Finished):
            spans = [(at(place, stage), phase, begin, end) for stage, phase, begin, end in delta.metrics.spans]
            metrics = msgspec.structs.replace(delta.metrics, spans=spans)
            token_ids = {at(place, stage): ids for stage, ids in delta.token_ids.items()}
            return msgspec.structs.replace(delta, token_ids=token_ids, metrics=metrics)
        stage: str | None = getattr(delta, "stage", None)
        return delta if stage is None else msgspec.structs.replace(delta, stage=at(place, stage))

    def _messages_for(self, request: Request, member: str) -> list[Message]:
        """The client's messages with the parts that a model takes, if several take the request."""
        takes = self.takes[member]
        kept = [
            msgspec.structs.replace(message, content=[part for part in message.content if _kind(part) in takes])
            for message in request.messages
        ]
        return [message for message in kept if message.content]

    def _needs(self, request: Request) -> dict[str, Needs]:
        """Return what a request needs of each model, in topological order. Raises `InvalidRequest` or `NotFound`."""
        self._check_names(request)
        found: dict[str, Needs] = {}
        for modality in request.modalities:
            member, _, own = modality.rpartition(".")
            if modality in self._givers:
                found.setdefault(self._givers[modality], Needs()).plain.add(modality)
            elif modality in self.card.own_outputs:
                found.setdefault(member, Needs()).named.add(own)
            else:
                known = sorted({*self._givers, *self.card.own_outputs})
                raise InvalidRequest(
                    f"modalities has {modality!r}; this graph gives {', '.join(known)}", field="modalities"
                )
        if not found:
            raise InvalidRequest(
                f"modalities is empty; this graph gives {', '.join(sorted(self._givers))}", field="modalities"
            )
        arriving = {place: [link.source for link in self.links if link.target == place] for place in self.places}
        for place in frozenset().union(*(reachable(place, arriving) for place in found)):
            found.setdefault(place, Needs())
        for link in self.links:
            if link.target in found:
                found[link.source].handed.add(link.carries)
        check_formats(request.formats, request.modalities)
        self._check_one_output(request, found)
        self._check_returns(request, found)
        return {member: found[member] for member in self.models if member in found}

    def _check_names(self, request: Request) -> None:
        check_kept(request, self.card)
        for stage in request.sampling:
            if stage not in self.card.sampling_stages:
                hint = nearest(stage, self.card.sampling_stages)
                raise InvalidRequest(f"sampling names stage {stage!r}, which does not sample{hint}", field="sampling")
        check_names(request, self.card, open_options=self.open_options)
        takes = frozenset().union(*(self.takes[member] for member in self.entries))
        for number, message in enumerate(request.messages):
            for place, part in enumerate(message.content):
                if _kind(part) not in takes:
                    path = part.field or f"messages[{number}].content[{place}]"
                    who = "; ".join(f"{one!r} takes {', '.join(sorted(self.takes[one]))}" for one in self.entries)
                    raise InvalidRequest(
                        f"{path} is {_kind(part)}, which no model takes from clients: {who}", field=path
                    )

    def _check_one_output(self, request: Request, found: Mapping[str, Needs]) -> None:
        for stage, params in request.sampling.items():
            needs = found.get(member_of(stage))
            if needs is None or (params.n or 1) == 1:
                continue
            path, place = f"sampling.{stage}.n", member_of(stage)
            if needs.handed:
                raise wrong(path, params.n, f"1: the output of {place!r} goes on to another model")
            if place in self._again:
                raise wrong(path, params.n, f"1: {place!r} may be visited several times")

    def _check_returns(self, request: Request, found: Mapping[str, Needs]) -> None:
        """Check that a conversation to which an edge returns can go on."""
        for place in self.entries:
            heads = {link.target for link in self.links if link.most}
            if place in heads and place in found and self.converses(place):
                for name in ("prompt_token_ids", "prompt_embeds"):
                    if getattr(request, name) is not None:
                        raise InvalidRequest(
                            f"{name} is given, but this graph returns to {place!r} with a text: send messages or a "
                            "prompt",
                            field=name,
                        )


def _again(params: SamplingParams, visit: int) -> SamplingParams:
    """The sampling of a later visit: its draws are others."""
    return params if params.seed is None else msgspec.structs.replace(params, seed=turn_seed(params.seed, visit))


def _chat(chat: ChatOptions, visit: int) -> ChatOptions:
    """The options of a visit: a later one is a reply to what came back."""
    return msgspec.structs.replace(chat, add_generation_prompt=True, continue_final_message=False) if visit else chat


def _formats(request: Request, needs: Needs, number: int | None) -> dict[str, Format]:
    """The formats of the files that the client gets from a model. Generation `number` is that part of the file, whose
    header cannot state the length of the whole; one base64 text could not be joined of those of its parts."""
    formats = {modality: form for modality, form in request.formats.items() if modality in needs.plain}
    audio = formats.get("audio")
    if number is not None and audio is not None:
        formats["audio"] = msgspec.structs.replace(
            audio, whole=False, base64=audio.base64 and not audio.whole, part=audio.part + number
        )
    return formats


def at(place: str, stage: str) -> str:
    """Return the name that clients have for a stage of the model at a place: it begins with that of the place."""
    return full_name(place, own_name(stage))


def _kind(part: Part) -> str:
    return part.kind if isinstance(part, MediaPart) else "text"


def _card(name: str, graph: ServedGraph, givers: Mapping[str, str], plan: Plan) -> ModelCard:
    """The card of a graph: what clients may ask of its models together."""
    cards = {member: model.card for member, model in graph.models.items()}
    main = cards[graph.main]
    return msgspec.structs.replace(
        main,
        name=name,
        family="model_graph",
        takes=frozenset().union(*(graph.takes[member] for member in graph.entries)),
        gives=frozenset(givers),
        tensors=dict(plan.graph.tensors),
        text_stage=at(graph.main, main.text_stage) if main.text_stage and givers.get("text") == graph.main else None,
        sampling_stages=[at(place, stage) for place, card in cards.items() for stage in card.sampling_stages],
        stages=list(plan.stages),
        voices=None if "audio" in givers else [],
        options=frozenset().union(*(card.options for card in cards.values())),
        open_options=graph.open_options,
        own_outputs=frozenset(f"{member}.{kind}" for member, card in cards.items() for kind in card.gives),
        appends=False,
        goes_on=False,
        several_texts=False,
        root="",
        adapters={name: path for card in cards.values() for name, path in card.adapters.items()},
        by_priority=any(card.by_priority for card in cards.values()),
        speech=None,
        says=None,
    )
