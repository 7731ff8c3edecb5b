"""Divide the memory of each device among its stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from typing import NoReturn

from segue.graph.deployment.deployment import Hardware, Hosts
from segue.graph.deployment.section import Section
from segue.graph.deployment.stage_plan import CPU
from segue.graph.parts import is_built_in
from segue.graph.plan.groups import Place
from segue.messages.addresses import SERVER
from segue.messages.errors import ConfigError

_POOL = 0.9
"""Share of a GPU's memory for stages by default: the rest is for CUDA contexts and fragmentation."""
_CPU_POOL = 0.4
"""Share of the host's memory for stages by default: other programs use it too, and shared-memory pools come on top."""
_SMALLEST_SHARE = 0.005


def share_memory(
    places: Mapping[str, Place], sections: Mapping[str, Section], weights: Mapping[str, int], hosts: Hosts
) -> dict[str, Place]:
    """Give every place its memory share: the file's, else a part of the remainder, by weight. Where the number of
    replicas follows the load, those of the start must fit with the file's shares, and all with shares given here.

    The input and output stages size nothing by their shares, so they get none by default.
    """
    said = {name: sections[name].number("memory_share", None, most=1.0) for name in places}
    fair: dict[str, list[float]] = {name: [] for name in places}
    for node, device in dict.fromkeys(where for one in places.values() for where in product(one.nodes, one.devices)):
        most = {name: _replicas_on(one, node, device, one.most) for name, one in places.items()}
        here = {name: _replicas_on(places[name], node, device, places[name].replicas) for name in most if most[name]}
        where = device if node == SERVER else f"{device} of node {node!r}"
        explicit = sum(share * count for name, count in here.items() if (share := said[name]) is not None)
        if explicit > 1.0 + 1e-9:
            _over(where, here, said, sections)
        silent = {name: weights[name] * most[name] for name in here if said[name] is None and not is_built_in(name)}
        pool = min(_CPU_POOL if device == CPU else _POOL, max(_POOL - explicit, (1.0 - explicit) / 2))
        for name in silent:
            share = math.floor(pool * weights[name] / sum(silent.values()) * 1000) / 1000
            if share < _SMALLEST_SHARE:
                raise ConfigError(
                    f"memory shares leave nothing of {where} for {name!r}: they add up to {explicit:.3g}; "
                    f"lower them, or set stages.{name}.memory_share",
                    field=f"stages.{name}.memory_share",
                )
            fair[name].append(share)
    shared = {}
    for name, one in places.items():
        share = said[name]
        if share is None:
            share = min(fair[name], default=0.0)
        size = min(bytes_of(share, one.devices, one.ranks, hosts.of(node)) for node in one.nodes)
        shared[name] = replace(one, memory_share=share, memory_bytes=size)
    return shared


def bytes_of(share: float, devices: Collection[str], ranks: int, hardware: Hardware) -> int:
    """Return a share of the memory of the smallest of these devices of a host, for one process."""
    memory = {CPU: hardware.memory_bytes, **{f"cuda:{number}": size for number, size in enumerate(hardware.gpus)}}
    size = int(share * min(memory.get(device, 0) for device in devices))
    return size // ranks if CPU in devices else size  # the ranks divide their replica's share


def _replicas_on(one: Place, node: str, device: str, replicas: int) -> int:
    """Return how many memory shares of so many replicas of a stage a device of a host holds: on a CPU, the ranks of a
    replica divide one share."""
    ranks = 1 if device == CPU else one.ranks
    here = (replica for replica in range(replicas) if one.nodes[replica % len(one.nodes)] == node)
    processes = (replica * ranks + rank for replica in here for rank in range(ranks))
    return sum(one.devices[process % len(one.devices)] == device for process in processes)


def _over(
    where: str, here: Mapping[str, int], said: Mapping[str, float | None], sections: Mapping[str, Section]
) -> NoReturn:
    parts = []
    for name, count in here.items():
        if said[name] is not None:
            times = f" x {count} replicas" if count > 1 else ""
            parts.append(f"{sections[name].find('memory_share')[0]} ({name}) {said[name]}{times}")
    total = sum(share * count for name, count in here.items() if (share := said[name]) is not None)
    raise ConfigError(
        f"memory shares add up to {total:.3g} on {where}, more than 1: {', '.join(parts)}",
        field=next(sections[name].find("memory_share")[0] for name in here if said[name] is not None),
    )
