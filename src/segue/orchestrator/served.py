"""A served model, as requests see it: what they may ask of it, and how they run. A graph of models has several."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from segue.graph.deployment.deployment import Plan
from segue.messages.deltas import Delta
from segue.messages.diffusion import check_diffusion
from segue.messages.errors import InvalidRequest, NotFound, nearest, wrong
from segue.messages.formats import check_formats
from segue.messages.request import Appended, Request, check_priority, check_types
from segue.messages.sampling import check_sampling, check_token_ids, merged
from segue.messages.tensors import check_tensors
from segue.messages.wire import StageFacts
from segue.models.shared.diffusion.sizes import Sizes
from segue.orchestrator.orchestrator import Orchestrator
from segue.orchestrator.requests.kept import check_kept
from segue.orchestrator.requests.open_request import OpenRequest, opened
from segue.orchestrator.requests.prompt_embeds import check_embeds_bytes
from segue.orchestrator.service import ModelCard
from segue.orchestrator.tokenless import check_tokenless
from segue.orchestrator.transcription import check_transcription, transcribed


def check_names(request: Request, card: ModelCard, *, open_options: bool) -> None:
    """Check that the model has the request's options, adapter and voice. `open_options`: only its stages know the
    options. Raises `InvalidRequest` or `NotFound`."""
    for option in () if open_options else request.options:
        if option not in card.options:
            hint = nearest(option, card.options)
            raise InvalidRequest(f"{card.name} has no option {option!r}{hint}", field=f"options.{option}")
    if request.adapter is not None and request.adapter not in card.adapters:
        hint = nearest(request.adapter, card.adapters)
        raise NotFound(f"{card.name} has no LoRA adapter {request.adapter!r}{hint}", field="adapter")
    if request.voice is not None and card.voices is not None and request.voice not in card.voices:
        hint = nearest(request.voice, card.voices)
        raise NotFound(f"{card.name} has no voice {request.voice!r}{hint}", field="voice")


class Served(Protocol):
    """What `AsyncOmni` runs requests on: a model, or a graph of models."""

    card: ModelCard

    @property
    def chats(self) -> bool:
        """Whether a bare text is a user message, else a prompt."""

    @property
    def open_options(self) -> bool:
        """Whether only the stages know the options."""

    @property
    def sizes(self) -> Sizes | None:
        """The sizes of images or video that it can make; None if its files alone do not tell."""

    @property
    def images(self) -> bool:
        """Whether it makes images or video."""

    def learn(self, facts: Mapping[str, StageFacts]) -> None:
        """Add to the card what its workers reported."""

    def check(self, request: Request) -> None:
        """Check all that can be checked before anything is loaded. Raises `InvalidRequest` or `NotFound`."""

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Yield deltas, `Finished` last; raises `SegueError`. Closing the generator cancels the request."""

    def open(self, request: Request, *, reply: bool) -> OpenRequest:
        """Start a request whose input is appended while it runs. Raises `SegueError`."""

    def stream_appended(self, request: Request, pieces: AsyncGenerator[str | Appended]) -> AsyncGenerator[Delta]:
        """As `stream`, of an open request to which the pieces are appended as they come."""


@dataclass(slots=True)
class ServedModel:
    """One model: `Served`."""

    card: ModelCard
    """With the full names of its stages."""
    plan: Plan
    """It may have the stages of other models, too."""
    orchestrator: Orchestrator
    chats: bool
    open_options: bool
    sizes: Sizes | None

    @property
    def images(self) -> bool:
        return not self.card.gives.isdisjoint(("image", "video"))

    def learn(self, facts: Mapping[str, StageFacts]) -> None:
        own = {stage: facts[stage] for stage in self.card.stages}
        self.card.vocab_sizes = {stage: fact.vocab_size for stage, fact in own.items() if fact.vocab_size is not None}
        self.card.voices = next((fact.voices for fact in own.values() if fact.voices), [])
        if self.card.text_stage is not None:
            self.card.max_model_len = own[self.card.text_stage].max_model_len

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        self.check_request(request)
        if request.open:
            raise wrong("open", request.open, "false: call AsyncOmni.open for a request whose input is appended")
        if self.card.speech is None or "text" not in request.modalities:
            return self.orchestrator.stream(request)
        assert self.card.text_stage is not None
        return transcribed(self.orchestrator.stream, request, self.card.speech, self.card.text_stage)

    def open(self, request: Request, *, reply: bool = False) -> OpenRequest:
        self.check_request(request)
        asked = opened(request, self.card, reply=reply)
        check_kept(asked, self.card)
        return OpenRequest(self.orchestrator, asked, self.plan.limits, self.card.tensors)

    async def stream_appended(self, request: Request, pieces: AsyncGenerator[str | Appended]) -> AsyncGenerator[Delta]:
        async with self.open(request) as running, aclosing(running.follow(pieces)) as deltas:
            async for delta in deltas:
                yield delta

    def check(self, request: Request) -> None:
        """Check all that can be checked before anything is loaded, including output sizes, but not voices. Raises
        `InvalidRequest` or `NotFound`; the input stage may still refuse a request that passes."""
        self.check_request(request)
        asked = request.diffusion
        if asked is None or self.sizes is None:
            return
        self.sizes.check(asked.height or 0, asked.width or 0, self.plan.limits.max_output_pixels)
        if asked.num_frames is not None:
            self.sizes.check_frames(asked.num_frames)

    def check_request(self, request: Request) -> None:
        """Check what a request asks for, before it is admitted. Raises `InvalidRequest` or `NotFound`."""
        if not self.card.tokenizer:
            check_tokenless(request)
        for stage, params in request.sampling.items():
            if stage not in self.card.sampling_stages:
                hint = nearest(stage, self.card.sampling_stages)
                raise InvalidRequest(f"sampling names stage {stage!r}, which does not sample{hint}", field="sampling")
            check_sampling(params, f"sampling.{stage}", self.plan.limits)
            if (vocab := self.card.vocab_sizes.get(stage)) is not None:
                check_token_ids(params, vocab, f"sampling.{stage}.")
        check_embeds_bytes(request, self.plan.limits.max_prompt_embeds_bytes)
        self._mark_thoughts(request)
        check_types(request)
        check_kept(request, self.card)
        check_formats(request.formats, request.modalities)
        check_tensors(request.tensors(), self.card.tensors, {})
        check_priority(request.priority, self.card.by_priority)
        if self.card.speech is not None and self.card.text_stage is not None:
            check_transcription(request, self.card.speech, self.card.text_stage)
        if request.diffusion is not None:
            check_diffusion(request.diffusion)
        check_names(request, self.card, open_options=self.open_options)

    def _mark_thoughts(self, request: Request) -> None:
        """Set `thought_marks` if a stage's reasoning is bounded or precedes structured output. Raises
        `InvalidRequest`."""
        for stage in self.card.sampling_stages:
            sampling = merged(request=request.sampling.get(stage), deployment=self.plan.stages[stage].sampling)
            most = sampling.thinking_token_budget
            bounded = most is not None and most != -1
            if not bounded and sampling.structured_outputs is None:
                continue
            marks = self.card.dialect.reasoning if stage == self.card.text_stage else None
            if marks is None:
                if not bounded:
                    continue
                field = f"sampling.{stage}.thinking_token_budget"
                raise InvalidRequest(
                    f"{field} is {most}, but this model's chat template marks no reasoning: leave it out",
                    field=field,
                )
            request.thought_marks = (marks.open, marks.close)
