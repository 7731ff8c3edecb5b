"""What a deployment says of a stage's LoRA adapters: the value of the stage key `lora`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import pairwise

from segue.graph.section import Section, as_mapping, wrong

LORA_KEYS = ("adapters", "max_rank", "max_adapters")
ADAPTED = ("autoregressive", "diffusion")
"""Engines whose stages can have adapters."""


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The LoRA adapters of a stage."""

    adapters: dict[str, str] = field(default_factory=dict)
    """By name: the directory; loaded when the stage is."""
    max_rank: int = 64
    max_adapters: int = 16
    """Loaded at once."""


def lora_of(section: Section) -> LoraPlan | None:
    """The adapters of a stage: those that its own section names, and those of the sections below it."""
    places: list[Section] = []
    place: Section | None = section
    while place is not None:
        if place.values.get("lora") is not None:
            places.append(Section(place.at("lora"), place.values["lora"], LORA_KEYS))
        place = place.below
    if not places:
        return None
    for upper, lower in pairwise(places):
        upper.below = lower
    adapters: dict[str, str] = {}
    for place in places:
        for name, directory in as_mapping(place.at("adapters"), place.values.get("adapters")).items():
            if not name or not isinstance(directory, str) or not directory:
                raise wrong(f"{place.at('adapters')}.{name}", directory, "the directory of an adapter, by its name")
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
