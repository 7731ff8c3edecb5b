"""From checkpoints to what serves them: the sources of the workers, and `Served`."""

from __future__ import annotations

from segue.graph.deployment.deployment import Plan
from segue.graph.kinds.registry import kind_of
from segue.messages.errors import ConfigError
from segue.messages.process import ModelSource
from segue.models.model_graph import Models
from segue.models.shared.checkpoint.files import check_files
from segue.orchestrator.joined.model_graph import ServedGraph
from segue.orchestrator.model_card import card_of, check_stage_keys
from segue.orchestrator.orchestrator import Orchestrator
from segue.orchestrator.served import Served, ServedModel
from segue.orchestrator.tokenless import KEY, check_tokenless_plan


def check_models(models: Models, plan: Plan) -> None:
    """Raise `ConfigError` for keys that a family does not support, and for files that cannot be served."""
    if plan.skip_tokenizer_init and models.graph.links:
        raise ConfigError(
            f"{KEY} is true, but the models of {models.called!r} hand over what they write: leave it out", field=KEY
        )
    for member, one in models.members.items():
        check_stage_keys(one.family, plan, member)
        check_tokenless_plan(one.family, plan)
        check_files(one.directory, one.config, one.graph)


def sources_of(models: Models) -> dict[str, ModelSource]:
    """Return the checkpoint of every model, with the transforms of the links that lead to it."""
    fed: dict[str, set[str]] = {}
    for link in models.graph.links:
        fed.setdefault(models.places[link.target], set()).add(link.transform)
    return {
        member: ModelSource(one.family.name, str(one.directory), sorted(fed[member] - {""}) if member in fed else None)
        for member, one in models.members.items()
    }


def preload_of(models: Models) -> list[str]:
    """Return the modules that the workers share."""
    stages = dict.fromkeys(one.family.stages_module for one in models.members.values())
    return [*stages, *sorted({kind_of(stage.engine).worker for stage in models.graph.stages.values()})]


def served(models: Models, name: str, plan: Plan, orchestrator: Orchestrator) -> Served:
    """Return what runs requests on these models; `name`: clients' name of it."""
    each = {
        member: ServedModel(
            card=card_of(member or name, one, plan, member),
            plan=plan,
            orchestrator=orchestrator,
            chats=not plan.skip_tokenizer_init and one.family.chats(one.directory),
            open_options=one.family.open_options,
            sizes=one.family.sizes(one.config, one.directory),
        )
        for member, one in models.members.items()
    }
    return ServedGraph(name, models, each, plan, orchestrator) if models.graph.members else each[""]
