"""Read stage keys that are more than one value, or that several engine kinds have: `lora` (the LoRA adapters of a
stage), `speculation` (the drafter and its number of draft tokens), `quantization`, `sampling`.

Optional reading: makes part of a `Deployment` from a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from segue.graph.deployment.section import Section, as_mapping, wrong
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.sampling import SamplingParams, sampling_from

QUANTIZATIONS = ("none", "bfloat16", "int8", "int4", "fp8")
"""Formats to which a stage converts the weights of its linear layers on loading."""
METHODS = ("ngram", "draft", "eagle", "medusa", "mtp")
WITH_MODEL = ("draft", "eagle", "medusa")
"""Methods that need a checkpoint of their own."""
SPECULATION_KEYS = ("method", "tokens", "model", "ngram_min", "ngram_max", "adaptive")
_FOREIGN = {
    "num_speculative_tokens": "tokens",
    "prompt_lookup_max": "ngram_max",
    "prompt_lookup_min": "ngram_min",
}
"""Key of vLLM's `--speculative-config` → our key, for the error message."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """Speculative decoding of one stage."""

    method: str
    """`ngram` (prompt lookup), `draft` (a smaller model), `eagle`, `medusa` (heads trained for the model), `mtp` (the
    model's own multi-token-prediction module)."""
    tokens: int = 4
    """Most drafts per request and step."""
    model: str | None = None
    """Directory of the checkpoint of `draft`, `eagle` or `medusa`."""
    ngram_min: int = 2
    """Prompt lookup: length of the shortest suffix that is looked up."""
    ngram_max: int = 4
    """Prompt lookup: length of the longest suffix that is looked up."""
    adaptive: bool = True
    """Switch speculation off for a request while it does not pay."""


def speculation_of(stage: Section) -> SpeculationPlan | None:
    """Read `speculation` from a stage's section; None if it is not set. Raises `ConfigError` naming key and value."""
    path, value = stage.find("speculation")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong(path, value, f"a mapping with a method: one of {', '.join(METHODS)}")
    section = Section(path, value, SPECULATION_KEYS, foreign=_FOREIGN)
    if section.values.get("method") is None:
        raise ConfigError(f"{path} has no method; it must be one of {', '.join(METHODS)}", field=section.at("method"))
    method = section.choice("method", "", METHODS)
    model = section.values.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong(section.at("model"), model, "the directory of a checkpoint")
    if model is None and method in WITH_MODEL:
        raise ConfigError(f"{path}.method is {method!r}, which needs {path}.model", field=section.at("model"))
    if model is not None and method not in WITH_MODEL:
        raise ConfigError(
            f"{path}.model is {model!r}, but the method {method!r} takes no model", field=section.at("model")
        )
    for key in ("ngram_min", "ngram_max"):
        if section.values.get(key) is not None and method != "ngram":
            raise ConfigError(f"{section.at(key)} is for the method 'ngram', not {method!r}", field=section.at(key))
    plan = SpeculationPlan(
        method=method,
        tokens=section.integer("tokens", 4),
        model=model,
        ngram_min=section.integer("ngram_min", min(2, section.integer("ngram_max", 2))),
        ngram_max=section.integer("ngram_max", max(4, section.integer("ngram_min", 4))),
        adaptive=section.flag("adaptive", True),
    )
    if plan.ngram_min > plan.ngram_max:
        raise wrong(section.at("ngram_min"), plan.ngram_min, f"at most ngram_max ({plan.ngram_max})")
    return plan


LORA_KEYS = ("adapters", "max_rank", "max_adapters")


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The LoRA adapters of a stage."""

    adapters: dict[str, str] = field(default_factory=dict)
    """Name → directory; loaded with the stage."""
    max_rank: int = 64
    max_adapters: int = 16
    """Most adapters loaded at the same time."""


def lora_of(section: Section) -> LoraPlan | None:
    """Read `lora`: the adapters of the stage's own section and of the sections that it inherits from."""
    plan = _adapters(section)
    if plan is not None and section.flag("deterministic", False):
        path, _ = section.find("lora")
        raise ConfigError(
            f"{path} cannot be combined with deterministic: an adapter's output depends on the batch", field=path
        )
    return plan


def _adapters(section: Section) -> LoraPlan | None:
    places: list[Section] = []
    place: Section | None = section
    while place is not None:
        if place.values.get("lora") is not None:
            places.append(Section(place.at("lora"), place.values["lora"], LORA_KEYS))
        place = None if "lora" in place.own else place.below
    if not places:
        return None
    for upper, lower in pairwise(places):
        upper.below = lower
    adapters: dict[str, str] = {}
    for place in places:
        for name, directory in as_mapping(place.at("adapters"), place.values.get("adapters")).items():
            if not name or not isinstance(directory, str) or not directory:
                raise wrong(f"{place.at('adapters')}.{name}", directory, "the directory of the adapter of this name")
            adapters.setdefault(name, os.path.abspath(os.path.expanduser(directory)))
    default = LoraPlan()
    plan = LoraPlan(
        adapters,
        places[0].integer("max_rank", default.max_rank),
        places[0].integer("max_adapters", default.max_adapters),
    )
    if len(adapters) > plan.max_adapters:
        path = places[0].at("max_adapters")
        raise wrong(path, plan.max_adapters, f"at least {len(adapters)}, the number of adapters")
    return plan


def quantization_of(section: Section, devices: tuple[str, ...]) -> str:
    """Read `quantization` of a stage on these devices."""
    kind = section.choice("quantization", "none", QUANTIZATIONS)
    if kind == "bfloat16" and "cpu" not in devices:
        path, _ = section.find("quantization")
        raise ConfigError(
            f"{path} is 'bfloat16', which is for stages on a CPU; on a GPU, set `dtype: bfloat16`, or make "
            "quantization int8, int4 or fp8",
            field=path,
        )
    return kind


def sampling_of(section: Section) -> SamplingParams:
    """Read `sampling`: the fields that the deployment sets."""
    path, _ = section.find("sampling")
    try:
        sampling = sampling_from(section.mapping("sampling"), path)
    except InvalidRequest as error:  # the same checks, but here the deployment must be corrected
        raise ConfigError(error.message, field=error.field) from error
    if sampling.n is not None:
        raise ConfigError(f"{path}.n is {sampling.n}; only a request can ask for several outputs", field=f"{path}.n")
    return sampling
