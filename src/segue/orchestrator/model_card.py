"""Make the model card from the facts that are known before a worker has started."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from segue.graph.deployment.deployment import Plan
from segue.graph.kinds.registry import kind_of
from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError
from segue.messages.speech import TextToSpeech
from segue.models.family import Family
from segue.orchestrator.service import ModelCard


def card_of(
    name: str, model_dir: Path, checkpoint: dict[str, Any], family: Family, graph: StageGraph, plan: Plan
) -> ModelCard:
    """Make the card of a model; `name`: clients' name of it."""
    text_stage = graph.main
    writes = kind_of(graph.stages[text_stage].engine).samples
    return ModelCard(
        name=name,
        family=family.name,
        takes=graph.takes,
        gives=graph.gives,
        tensors=dict(graph.tensors),
        text_stage=text_stage if writes else None,
        sampling_stages=[stage.name for stage in graph.stages.values() if kind_of(stage.engine).samples],
        stages=list(graph.topological()),
        voices=None if "audio" in graph.gives else [],
        options=family.options,
        tokenizer=not plan.skip_tokenizer_init,
        appends=family.appends,
        open_options=family.open_options,
        max_model_len=None,
        created=int(time.time()),
        several_texts=writes and not _feeds_text(graph, text_stage),
        root=str(model_dir),
        adapters={
            name: path
            for stage in plan.stages.values()
            if stage.lora is not None
            for name, path in stage.lora.adapters.items()
        },
        by_priority=any(stage.scheduling == "priority" for stage in plan.stages.values()),
        speech=None if family.speech is None else family.speech(checkpoint, model_dir),
        says=_says(family, checkpoint, model_dir, plan),
        limits=plan.limits,
        deadline=plan.limits.default_deadline or plan.limits.http_deadline,
        dialect=family.dialect(model_dir, checkpoint),
    )


def _says(family: Family, checkpoint: dict[str, Any], model_dir: Path, plan: Plan) -> TextToSpeech | None:
    """How the model says a given text, with the deployment's own sampling parameters."""
    says = family.says(checkpoint, model_dir)
    if says is None or plan.skip_tokenizer_init:
        return None
    sampling = {stage: plan.stages[stage].sampling.over(usual) for stage, usual in says.sampling.items()}
    return msgspec.structs.replace(says, sampling=sampling)


def check_stage_keys(family: Family, plan: Plan) -> None:
    """Raise `ConfigError`, naming the key, if a stage's plan asks for something that its family cannot do."""
    for name, stage in plan.stages.items():
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
