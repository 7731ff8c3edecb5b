"""Make the model card from the facts that are known before a worker has started.

Optional reading: what endpoints tell of a model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from segue.graph.deployment.deployment import Plan
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.kinds.registry import kind_of
from segue.graph.parts import full_name, member_of
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError
from segue.messages.speech import TextToSpeech
from segue.models.family import Family
from segue.models.model_graph import Checkpoint
from segue.orchestrator.service import ModelCard


def card_of(name: str, model: Checkpoint, plan: Plan, member: str = "") -> ModelCard:
    """Make the card of a model; `name`: clients' name of it; `member`: its name in a graph of models."""
    graph, family, checkpoint, model_dir = model.graph, model.family, model.config, model.directory
    stages = {full_name(member, stage): plan.stages[full_name(member, stage)] for stage in graph.topological()}
    text_stage = graph.main
    writes = kind_of(graph.stages[text_stage].engine).samples
    return ModelCard(
        name=name,
        family=family.name,
        takes=graph.takes,
        gives=graph.gives,
        tensors=dict(graph.tensors),
        text_stage=full_name(member, text_stage) if writes else None,
        sampling_stages=[name for name, stage in stages.items() if kind_of(stage.engine).samples],
        stages=list(stages),
        voices=None if "audio" in graph.gives else [],
        options=family.options,
        tokenizer=not plan.skip_tokenizer_init,
        appends=family.appends,
        goes_on=family.goes_on,
        open_options=family.open_options,
        max_model_len=None,
        created=int(time.time()),
        several_texts=writes and not _feeds_text(graph, text_stage),
        root=str(model_dir),
        adapters={
            name: path
            for stage in stages.values()
            if stage.lora is not None
            for name, path in stage.lora.adapters.items()
        },
        by_priority=any(stage.scheduling == "priority" for stage in stages.values()),
        speech=None if family.speech is None else family.speech(checkpoint, model_dir),
        says=_says(model, stages, member) if "audio" in graph.gives and not plan.skip_tokenizer_init else None,
        limits=plan.limits,
        deadline=plan.limits.default_deadline or plan.limits.http_deadline,
        dialect=family.dialect(model_dir, checkpoint),
    )


def _says(model: Checkpoint, stages: Mapping[str, StagePlan], member: str) -> TextToSpeech | None:
    """How the model says a given text, with the deployment's own sampling parameters."""
    says = model.family.says(model.config, model.directory)
    if says is None:
        return None
    usual = {full_name(member, stage): params for stage, params in says.sampling.items()}
    return msgspec.structs.replace(
        says, sampling={stage: stages[stage].sampling.over(params) for stage, params in usual.items()}
    )


def check_stage_keys(family: Family, plan: Plan, member: str = "") -> None:
    """Raise `ConfigError`, naming the key, if the plan of a stage of a model asks for something that its family cannot
    do."""
    for name, stage in plan.stages.items():
        if member_of(name) != member:
            continue
        for key in stage.asked_of_family:
            if key not in family.stage_keys:
                raise ConfigError(
                    f"stages.{name}.{key} is set, but the family {family.name!r} does not support it; leave it out",
                    field=f"stages.{name}.{key}",
                )


def _feeds_text(graph: StageGraph, stage: str) -> bool:
    """Whether a stage downstream of this one gives text: then it may feed that stage in a request for text alone."""
    below = set(graph.downstreams(stage))
    return any("text" in graph.stages[name].gives or _feeds_text(graph, name) for name in below)
