"""What each stage gets of the machine: a worker, devices, memory, threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from segue.graph.deployment import Hardware
from segue.graph.groups import check_alone, groups_of
from segue.graph.memory_shares import share_memory
from segue.graph.place import Place
from segue.graph.section import Section, wrong
from segue.graph.stage_graph import INPUT, Stage, StageGraph
from segue.graph.wiring import Connectors
from segue.graph.wishes import CPU, Wish, joined_wish, path_of, said_of_ranks, wish_of
from segue.graph.written import Wire
from segue.messages.errors import ConfigError

_MOST_GPU_THREADS = 4
"""A worker whose network runs on a GPU only feeds it."""


def place(
    graph: StageGraph,
    sections: Mapping[str, Section],
    hardware: Hardware,
    connectors: Connectors,
    wires: Sequence[Wire],
) -> tuple[tuple[tuple[str, ...], ...], dict[str, Place]]:
    """(groups of stages that share a worker, place of every stage)."""
    wishes = {name: wish_of(graph, name, sections[name], hardware) for name in graph.topological()}
    apart = {(wire.source, wire.target) for wire in wires if connectors.kind_of(wire) == "shm"}
    groups = groups_of(graph, sections, wishes, apart)
    joined = {group: joined_wish(group, wishes) for group in groups}
    weights = {name: _weight(graph.stages[name], graph.main) for name in wishes}
    for group in groups:
        check_alone(group, joined[group], sections)
    devices = _spread(joined, weights, hardware, sections)
    replicas = {group: _replicas(group, joined[group], devices[group], sections) for group in groups}
    threads = _threads(joined, devices, replicas, weights, hardware, _light(graph, groups))
    places = {
        name: Place(devices[group], replicas[group], threads[group], 0.0, 0, joined[group].ranks or 1)
        for group in groups
        for name in group
    }
    return groups, share_memory(places, sections, weights, hardware)


def _weight(stage: Stage, main: str) -> int:
    """How much of a machine a stage is likely to need, next to the others. A guess: the graph knows no sizes."""
    if stage.engine == "module":
        return 1
    return 6 if stage.name == main else 3


def _spread(
    joined: Mapping[tuple[str, ...], Wish],
    weights: Mapping[str, int],
    hardware: Hardware,
    sections: Mapping[str, Section],
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The devices of every group; where the file is silent, the GPU with the least on it (one for each rank), in
    topological order."""
    load = dict.fromkeys((f"cuda:{number}" for number in range(len(hardware.gpus))), 0)
    for group, wish in joined.items():
        for device in wish.devices or ():
            if device != CPU:
                load[device] += sum(weights[name] for name in group)
    devices = {}
    for group, wish in joined.items():
        ranks = wish.ranks or 1
        if wish.devices is not None:
            devices[group] = wish.devices
        elif load:
            lightest = sorted(sorted(load, key=load.__getitem__)[:ranks])
            for device in lightest:
                load[device] += sum(weights[name] for name in group)
            devices[group] = tuple(lightest)
        else:
            devices[group] = (CPU,)
        if CPU not in devices[group] and len(devices[group]) % ranks:
            path, said = said_of_ranks(group, sections)
            raise ConfigError(
                f"{said} is {ranks}, but the stage has {len(devices[group])} GPUs ({', '.join(devices[group])}); "
                "their number must be a multiple of it",
                field=path,
            )
    return devices


def _replicas(group: tuple[str, ...], wish: Wish, devices: tuple[str, ...], sections: Mapping[str, Section]) -> int:
    least = max(1, len(devices) // (wish.ranks or 1))
    if wish.replicas is not None and wish.replicas < least:
        path = path_of("replicas", group, sections)
        of_each = f", {wish.ranks} for each" if wish.ranks else ""
        right = f"at least {least}, the number of its devices ({', '.join(devices)}{of_each})"
        raise wrong(path, wish.replicas, right)
    return wish.replicas or least


def _light(graph: StageGraph, groups: Collection[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Workers that no core is kept for. What takes the time of a picture are the calls of its denoiser, tens of them;
    its encoders and its decoder are called once, and threads of their own beside those of the denoiser were measured to
    gain nothing, with one client nor with eight. And tokenizing takes a moment per request."""
    denoising = {group for group in groups if any(graph.stages[name].engine == "diffusion" for name in group)}
    if denoising:
        return set(groups) - denoising
    return {(INPUT,)} if graph.takes <= {"text"} else set()


def _threads(
    joined: Mapping[tuple[str, ...], Wish],
    devices: Mapping[tuple[str, ...], tuple[str, ...]],
    replicas: Mapping[tuple[str, ...], int],
    weights: Mapping[str, int],
    hardware: Hardware,
    light: Collection[tuple[str, ...]],
) -> dict[tuple[str, ...], int]:
    """CPU threads per worker: one each, then core by core to the worker that has the fewest for its weight. `light`:
    workers that have next to nothing to do, and share the cores of the others.

    More threads than cores make every operator wait for the slowest, so the sum goes over the cores only where there
    are more workers than cores, or the file says so.
    """
    said = {group: wish.threads for group, wish in joined.items() if wish.threads is not None}
    threads = {group: said.get(group, 1) for group in joined}
    weight = {
        group: sum(weights[name] for name in group) if CPU in devices[group] else 1
        for group in joined
        if group not in said and group not in light
    }
    most = {group: hardware.cpus if CPU in devices[group] else _MOST_GPU_THREADS for group in weight}
    left = hardware.cpus - sum(threads[group] * replicas[group] for group in joined if group not in light)
    while hungry := [group for group in weight if threads[group] < most[group] and replicas[group] <= left]:
        group = max(hungry, key=lambda group: weight[group] / threads[group])
        threads[group] += 1
        left -= replicas[group]
    return threads
