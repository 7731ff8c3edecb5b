"""Divide the memory of each device among its stages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.section import Section
from segue.graph.deployment.stage_plan import CPU
from segue.graph.parts import is_built_in
from segue.graph.plan.groups import Place
from segue.messages.errors import ConfigError

_POOL = 0.9
"""Share of a GPU's memory for stages by default: the rest is for CUDA contexts and fragmentation."""
_CPU_POOL = 0.4
"""Share of the host's memory for stages by default: other programs use it too, and shared-memory pools come on top."""
_SMALLEST_SHARE = 0.005


def share_memory(
    places: Mapping[str, Place], sections: Mapping[str, Section], weights: Mapping[str, int], hardware: Hardware
) -> dict[str, Place]:
    """Give every place its memory share: the file's, else a part of the remainder, by weight. Where the number of
    replicas follows the load, those of the start must fit with the file's shares, and all with shares given here.

    The input and output stages size nothing by their shares, so they get none by default.
    """
    said = {name: sections[name].number("memory_share", None, most=1.0) for name in places}
    fair: dict[str, list[float]] = {name: [] for name in places}
    for device in dict.fromkeys(device for one in places.values() for device in one.devices):
        here = {name: _replicas_on(one, device, one.replicas) for name, one in places.items() if device in one.devices}
        explicit = sum(share * count for name, count in here.items() if (share := said[name]) is not None)
        if explicit > 1.0 + 1e-9:
            _over(device, here, said, sections)
        silent = {
            name: weights[name] * _replicas_on(places[name], device, places[name].most)
            for name in here
            if said[name] is None and not is_built_in(name)
        }
        pool = min(_CPU_POOL if device == CPU else _POOL, max(_POOL - explicit, (1.0 - explicit) / 2))
        for name in silent:
            share = math.floor(pool * weights[name] / sum(silent.values()) * 1000) / 1000
            if share < _SMALLEST_SHARE:
                raise ConfigError(
                    f"memory shares leave nothing of {device} for {name!r}: they add up to {explicit:.3g}; "
                    f"lower them, or set stages.{name}.memory_share",
                    field=f"stages.{name}.memory_share",
                )
            fair[name].append(share)
    memory = {CPU: hardware.memory_bytes, **{f"cuda:{number}": size for number, size in enumerate(hardware.gpus)}}
    shared = {}
    for name, one in places.items():
        share = said[name]
        if share is None:
            share = min(fair[name], default=0.0)
        size = int(share * min(memory[device] for device in one.devices))
        if CPU in one.devices:
            size //= one.ranks  # the ranks divide their replica's share
        shared[name] = replace(one, memory_share=share, memory_bytes=size)
    return shared


def _replicas_on(one: Place, device: str, replicas: int) -> int:
    """Return how many memory shares of so many replicas of a stage a device holds: on a CPU, the ranks of a replica
    divide one share."""
    processes = replicas if device == CPU else replicas * one.ranks
    return sum(one.devices[process % len(one.devices)] == device for process in range(processes))


def _over(
    device: str, here: Mapping[str, int], said: Mapping[str, float | None], sections: Mapping[str, Section]
) -> NoReturn:
    parts = []
    for name, count in here.items():
        if said[name] is not None:
            times = f" x {count} replicas" if count > 1 else ""
            parts.append(f"{sections[name].find('memory_share')[0]} ({name}) {said[name]}{times}")
    total = sum(share * count for name, count in here.items() if (share := said[name]) is not None)
    raise ConfigError(
        f"memory shares add up to {total:.3g} on {device}, more than 1: {', '.join(parts)}",
        field=next(sections[name].find("memory_share")[0] for name in here if said[name] is not None),
    )
