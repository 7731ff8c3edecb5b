"""`AsyncOmni`: run a model, split into stages, from async Python. `blocking` has the blocking form for scripts."""

from __future__ import annotations

import asyncio
import logging
import operator
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from segue.graph.deployment.loader import load_plan, stage_overrides
from segue.graph.machine.account import cautions
from segue.graph.parts import INPUT, TOKENS
from segue.media.arrays import embeds_file
from segue.media.parts import IMAGES, image_parts, messages_from, multi_modal_parts, tensors_from
from segue.media.sources import MediaPolicy
from segue.messages.deltas import Delta, ProgressDelta, TokensDelta
from segue.messages.diffusion import PARAMETERS, DiffusionParams, diffusion_from
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed, nearest, shown, wrong
from segue.messages.join import Listen
from segue.messages.request import MULTI_MODAL_DATA, Appended, MediaPart, Message, Request
from segue.messages.sampling import SamplingParams, sampling_from
from segue.models.model_graph import ModelGraph, read_models
from segue.models.shared.diffusion.sizes import Sizes
from segue.observe.stats import render_gauges, render_worker_stats
from segue.orchestrator.omni.outputs import Collector, RequestOutput
from segue.orchestrator.omni.progress import StepBar
from segue.orchestrator.orchestrator import Orchestrator
from segue.orchestrator.requests.open_request import OpenRequest
from segue.orchestrator.served import Served
from segue.orchestrator.service import Health, MovedWorker
from segue.orchestrator.serving import check_models, preload_of, served, sources_of
from segue.orchestrator.workers.supervisor import OnProgress

log = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any]
"""Text, or `{"messages": [...]}`, `{"prompt": "..."}` (text without a chat template) or `{"prompt_token_ids":
[...]}`, with any of the keyword arguments of `generate` for this request alone. A prompt, or token ids, may have its
media in `multi_modal_data`: kind → one medium, or a list. Bare text is a user message if the checkpoint has a chat
template, else a prompt."""
Sampling = SamplingParams | Mapping[str, SamplingParams | Mapping[str, Any]] | None
"""Sampling parameters of the main stage, or stage name → parameters."""

_PROMPT_KEYS = frozenset(
    {"messages", "prompt", "prompt_token_ids", "prompt_embeds", MULTI_MODAL_DATA, "modalities", "voice", "sampling",
     "seed", "priority", "deadline", "options", "return_prompt_ids", "adapter", "cache_salt", "session", "keep",
     "previous", "tensors"}
)  # fmt: skip


class AsyncOmni:
    """A running model, async. `async with AsyncOmni(DIR) as omni: async for delta in omni.stream(...)`."""

    def __init__(
        self,
        model: str | Path | ModelGraph,
        *,
        config: str | Path | Mapping[str, Any] | None = None,
        dtype: str | None = None,
        load_format: str = "auto",
        deterministic: bool = False,
        skip_tokenizer_init: bool = False,
        name: str | None = None,
        speculation: Mapping[str, Any] | None = None,
        tensor_parallel: int | None = None,
        quantization: str | None = None,
        kv_dtype: str | None = None,
        scheduling: str | None = None,
        lora: Mapping[str, str | Path] | None = None,
        on_progress: OnProgress | None = None,
        listen: Listen | None = None,
    ) -> None:
        """`model`: a directory, or OWNER/MODEL in the cache of Hugging Face's hub; or a graph of models, or a file
        `*.py` that has one. `config`: a deployment file, or its content. `name`: clients' name of the model (default:
        the directory, OWNER/MODEL, or the name of the graph).
        `dtype`, `speculation`, `tensor_parallel`, `quantization`, `kv_dtype` and `scheduling` are keys of a stage that
        override the deployment's `defaults`. `skip_tokenizer_init`: load no tokenizer; prompts and replies are then
        token ids. `lora`: name → directory of adapters in addition to the deployment's; an
        empty mapping allows adapters to be loaded later. `listen`: where other hosts join (`segue join`).

        Raises `ConfigError` for a model or deployment that cannot be served.
        """
        models = read_models(model)
        overrides = stage_overrides(
            dtype,
            deterministic=deterministic,
            speculation=speculation,
            tensor_parallel=tensor_parallel,
            quantization=quantization,
            kv_dtype=kv_dtype,
            scheduling=scheduling,
            lora=None if lora is None else {"adapters": {name: str(path) for name, path in lora.items()}},
        )
        self.plan = load_plan(models.graph, config, overrides=overrides, skip_tokenizer_init=skip_tokenizer_init)
        for caution in cautions(self.plan):
            log.warning("%s", caution)
        check_models(models, self.plan)
        limits = self.plan.limits
        self._policy = MediaPolicy(allow_paths=True, max_bytes=limits.max_media_bytes, max_items=limits.max_media_parts)
        self.orchestrator = Orchestrator(
            self.plan,
            sources=sources_of(models),
            preload=preload_of(models),
            load_format=load_format,
            on_progress=on_progress,
            listen=listen,
        )
        self._served: Served = served(models, name or models.called, self.plan, self.orchestrator)
        self.card = self._served.card
        if self.card.name in self.card.adapters:
            raise ConfigError(f"{self.card.name!r} is the name of the model and of a LoRA adapter", field="lora")

    @property
    def sizes(self) -> Sizes | None:
        """The sizes of images or video that the model can make; None if its files alone do not tell."""
        return self._served.sizes

    async def start(self) -> None:
        """Return when every stage is ready; raise the first worker's own error otherwise."""
        await self.orchestrator.start()
        self._served.learn(self.orchestrator.replicas.facts)

    async def stop(self, *, drain: bool = True) -> None:
        """Let running requests finish (`drain`), then end every process and free everything."""
        await self.orchestrator.stop(drain=drain)

    async def finish(self) -> None:
        """Admit no more requests, and end those still running after `limits.drain_seconds` with `ShuttingDown`; the
        processes stay until `stop`."""
        await self.orchestrator.finish()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.orchestrator.stop(drain=error is None)

    async def load_lora(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter in PEFT's format: on return, every worker of the stage has it and requests can name it.

        Raises `InvalidRequest` naming file and key if it cannot be served.
        """
        if self.plan.graph.members:
            raise InvalidRequest("adapters of a graph of models are those of its deployment", field="lora_name")
        if name == self.card.name:
            raise InvalidRequest(f"lora_name is {name!r}, the name of the model itself", field="lora_name")
        self.card.adapters[name] = await self.orchestrator.supervisor.adapters.load(name, str(path))

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter: running requests keep it, new ones cannot name it. Raises `NotFound`."""
        self.orchestrator.supervisor.adapters.unload(name)
        self.card.adapters.pop(name, None)

    async def move_worker(self, from_stage: str, to_stage: str) -> MovedWorker:
        """Move a worker from one stage to another; return when it serves there. If this is cancelled, the move goes on.

        Raises `InvalidRequest` if none can move, `Overloaded` while another one moves, `StageLost` if it could not load
        the stage.
        """
        return await asyncio.shield(self.orchestrator.supervisor.moves.begin(from_stage, to_stage))

    def health(self) -> Health:
        return self.orchestrator.replicas.health()

    def metrics(self) -> bytes:
        """Return the metrics of the orchestrator and the workers as Prometheus text."""
        moves = self.orchestrator.supervisor.moves
        waiting = sum(1 for state in self.orchestrator.requests.values() if state.waiting)
        return render_gauges(
            {
                "segue_requests": ("Requests admitted and not finished.", len(self.orchestrator.requests)),
                "segue_requests_waiting": ("Of these, those that wait for a worker.", waiting),
                "segue_worker_moves": ("Workers that move to another stage now.", moves.running),
                "segue_worker_moves_total": ("Workers that have moved to another stage.", moves.count),
                "segue_workers_added_total": ("Workers that were added to a stage by its load.", moves.added),
                "segue_workers_removed_total": ("Workers that were removed from a stage by its load.", moves.removed),
            }
        ) + render_worker_stats(stage for stats in self.orchestrator.stats.values() for stage in stats.stages)

    def check(self, request: Request) -> None:
        """Check all that can be checked before anything is loaded, including output sizes, but not voices. Raises
        `InvalidRequest` or `NotFound`; the input stage may still refuse a request that passes."""
        self._served.check(request)

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Yield deltas, `Finished` last; raises `SegueError`. Closing the generator cancels the request."""
        return self._served.stream(request)

    def open(self, request: Request, *, reply: bool = False) -> OpenRequest:
        """Start a request whose input is appended while it runs. `reply`: the model replies to its prompt before it
        takes more; without, what is appended continues the prompt. Raises `SegueError`, for models that take their
        input at once as well."""
        return self._served.open(request, reply=reply)

    def stream_appended(self, request: Request, pieces: AsyncGenerator[str | Appended]) -> AsyncGenerator[Delta]:
        """As `stream`, of an open request to which the pieces are appended as they come."""
        return self._served.stream_appended(request, pieces)

    async def room(self) -> None:
        """Return as soon as the queue is not full."""
        await self.orchestrator.room()

    async def generate(self, prompt: Prompt, *, step_bar: bool = False, **settings: Any) -> RequestOutput:
        """Run one request to its end. `step_bar`: draw a bar of denoising steps. `settings` as for `Omni.generate`."""
        return await self.output(self.request(prompt, **settings), step_bar=step_bar)

    async def output(self, request: Request, *, step_bar: bool = False) -> RequestOutput:
        """Collect all deltas of `stream` into one output."""
        collector = Collector(request.request_id, wants_audio="audio" in request.modalities)
        params = request.diffusion or DiffusionParams()
        if step_bar and self._served.images:
            request.diffusion = msgspec.structs.replace(params, progress=True)
        with closing(StepBar(params.num_images_per_prompt)) as bar:
            async for delta in self.stream(request):
                collector.add(delta)
                if step_bar and isinstance(delta, ProgressDelta):
                    bar.show(delta)
        return collector.output()

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids, including chat template and media placeholders; only the input stage runs."""
        return (await self._tokens(self.request(prompt, modalities=[TOKENS]))).token_ids

    async def detokenize(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return (await self._tokens(self.request({"prompt_token_ids": token_ids}, modalities=[TOKENS]))).text

    async def _tokens(self, request: Request) -> TokensDelta:
        async with aclosing(self.stream(request)) as deltas:
            async for delta in deltas:
                if isinstance(delta, TokensDelta):
                    return delta
        raise StageFailed("the input stage gave no tokens", stage=INPUT)

    def request(
        self,
        prompt: Prompt,
        *,
        modalities: Iterable[str] | None = None,
        voice: str | None = None,
        sampling: Sampling = None,
        seed: int | None = None,
        priority: int = 0,
        deadline: float | None = None,
        options: Mapping[str, Any] | None = None,
        return_prompt_ids: bool = False,
        adapter: str | None = None,
        cache_salt: str | None = None,
        session: str = "",
        keep: bool = False,
        previous: str | None = None,
        **parameters: Any,
    ) -> Request:
        """Make a `Request` from a Python caller's arguments; media may be PIL images, arrays, paths or bytes.

        `modalities`: requested outputs (default: those of the main stage). `deadline`: Unix time. `adapter`: name of a
        LoRA adapter. `cache_salt`: share the prefix cache only with requests that have the same salt. `session`: its
        requests go to one replica of a stage that is routed by session. `keep`: others may go on from the request; they
        name its id as `previous`. `parameters`: for models that make images or
        video, arguments of their pipelines (`segue.messages.diffusion.DiffusionParams`) and images
        (`segue.media.parts`).
        """
        if not isinstance(prompt, str | Mapping):
            right = "text, or a dict with one of 'messages', 'prompt', 'prompt_token_ids' and 'prompt_embeds'"
            raise InvalidRequest(f"the prompt is {shown(prompt)}; it must be {right}", field="prompt")
        given = self._written(prompt) if isinstance(prompt, str) else dict(prompt)
        given = {**parameters, **given}
        if self.card.speech is not None and "audio" in given:
            audio = {"type": "audio", "audio": given.pop("audio")}
            given.setdefault("messages", [{"role": "user", "content": [audio]}])
        known = _PROMPT_KEYS | (PARAMETERS | IMAGES if self._served.images else frozenset())
        if self._served.open_options:
            known -= {"prompt_embeds"}  # a pipeline may have an argument of that name
        others = {key: value for key, value in given.items() if self._served.open_options and key not in known}
        for key in given.keys() - others.keys():
            if key in SamplingParams.__struct_fields__ and key not in known:
                raise InvalidRequest(
                    f"{key} is of sampling: write sampling=SamplingParams({key}={shown(given[key])})", field=key
                )
            if key not in known:
                raise InvalidRequest(f"a request has no key {key!r}{nearest(key, known)}", field=key)
        media = self._multi_modal(given)
        tensors = tensors_from(_mapping(given.get("tensors") or {}, "tensors"), self._policy, "tensors")
        images = image_parts({key: given[key] for key in given if key in IMAGES}, self._policy)
        ids, text, embeds = given.get("prompt_token_ids"), given.get("prompt"), given.get("prompt_embeds")
        embeds = embeds if "prompt_embeds" in known else None
        if sum(value is not None for value in (ids, text, embeds, given.get("messages"))) != 1:
            raise InvalidRequest(
                "a request needs exactly one of 'messages', 'prompt', 'prompt_token_ids' and 'prompt_embeds'",
                field="messages",
            )
        written = given.get("messages")
        messages = [] if written is None else messages_from(written, self._policy)
        if media or images or tensors:
            messages.append(Message("user", [*media, *images, *tensors]))
        default_out = min(self.plan.graph.stages[self.plan.graph.main].gives)
        request_id = uuid.uuid4().hex
        return Request(
            request_id=request_id,
            messages=messages,
            prompt=text,
            prompt_token_ids=None if ids is None else _token_ids(ids),
            prompt_embeds=None if embeds is None else embeds_file(embeds),
            modalities=_listed(given.get("modalities", modalities) or [default_out]),
            voice=given.get("voice", voice),
            sampling=self._sampling(given.get("sampling", sampling)),
            diffusion=self._diffusion(given),
            seed=given.get("seed", seed),
            priority=given.get("priority", priority),
            deadline=given.get("deadline", deadline),
            adapter=given.get("adapter", adapter),
            cache_salt=given.get("cache_salt", cache_salt),
            session=given.get("session", session),
            keep=_kept_as(request_id, given.get("keep", keep)),
            previous=given.get("previous", previous),
            return_prompt_ids=given.get("return_prompt_ids", return_prompt_ids),
            options={**_mapping(given.get("options", options) or {}, "options"), **others},
        )

    def _multi_modal(self, given: Mapping[str, Any]) -> list[MediaPart]:
        """The media of a prompt."""
        if (data := given.get(MULTI_MODAL_DATA)) is None:
            return []
        if given.get("prompt") is None and given.get("prompt_token_ids") is None:
            raise InvalidRequest(
                f"{MULTI_MODAL_DATA} is given without 'prompt' or 'prompt_token_ids'; in 'messages', media are parts "
                "of content",
                field=MULTI_MODAL_DATA,
            )
        return multi_modal_parts(data, self._policy)

    def _written(self, text: str) -> dict[str, Any]:
        """Turn bare text into a user message or a prompt."""
        return {"messages": [{"role": "user", "content": text}]} if self._served.chats else {"prompt": text}

    def _diffusion(self, given: Mapping[str, Any]) -> DiffusionParams | None:
        asked = {key: given[key] for key in given if key in PARAMETERS}
        return diffusion_from(asked) if asked else None

    @property
    def _sampled(self) -> str:
        """The stage that bare sampling parameters are for: the main one, or the only one that samples."""
        main, stages = self.plan.graph.main, self.card.sampling_stages
        return stages[0] if main not in stages and len(stages) == 1 else main

    def _sampling(self, sampling: Sampling) -> dict[str, SamplingParams]:
        if sampling is None:
            return {}
        if isinstance(sampling, SamplingParams):
            return {self._sampled: sampling}
        for name in _mapping(sampling, "sampling"):
            if name in SamplingParams.__struct_fields__ and name not in self.card.sampling_stages:
                raise InvalidRequest(
                    f"sampling.{name} names no stage: write SamplingParams({name}=…), or "
                    f"{{{self._sampled!r}: {{{name!r}: …}}}}",
                    field=f"sampling.{name}",
                )
        return {
            stage: params
            if isinstance(params, SamplingParams)
            else sampling_from(dict(_mapping(params, f"sampling.{stage}")), f"sampling.{stage}", self.plan.limits)
            for stage, params in _mapping(sampling, "sampling").items()
        }


def _kept_as(request_id: str, keep: Any) -> str:
    """Return the name by which a request is kept; empty if it is not."""
    if not isinstance(keep, bool):
        raise wrong("keep", keep, "true or false")
    return request_id if keep else ""


def _token_ids(ids: Any) -> list[int]:
    """Return ids from any sequence of integers, including arrays."""
    try:
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise wrong("prompt_token_ids", ids, "a list of integers") from error


def _listed(modalities: Any) -> list[str]:
    if isinstance(modalities, (str, Mapping)) or not isinstance(modalities, Iterable):
        right = f'a list, e.g. ["{modalities}"]' if isinstance(modalities, str) else "a list of names"
        raise wrong("modalities", modalities, right)
    return list(modalities)


def _mapping(value: Any, field: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise wrong(field, value, "an object (a mapping)")
    return value
