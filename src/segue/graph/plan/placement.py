"""Assign each stage a worker, devices, memory and threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from segue.graph.deployment.deployment import Hardware, Hosts
from segue.graph.deployment.section import Section, wrong
from segue.graph.deployment.stage_plan import CPU
from segue.graph.deployment.written import Wire, Wish, joined_wish, path_of, said_of_ranks, wish_of
from segue.graph.kinds.registry import kind_of
from segue.graph.parts import is_built_in, only_reads
from segue.graph.plan.groups import Place, check_alone, groups_of
from segue.graph.plan.memory_shares import share_memory
from segue.graph.plan.wiring import Connectors
from segue.graph.stage_graph import StageGraph
from segue.messages.addresses import SERVER
from segue.messages.errors import ConfigError

_MOST_INPUTS = 4
"""Default input workers of a model that takes media, and at most one more than cores: while some decode large files,
one is free for other requests. They are mostly idle."""
_MOST_GPU_THREADS = 4
"""Most threads of a worker whose network runs on a GPU: the CPU only feeds it."""
_ROUTING = ("load", "prefix")
"""Default routing: among equally loaded replicas, the one that had most of the prompt."""


def place(
    graph: StageGraph,
    sections: Mapping[str, Section],
    hosts: Hosts,
    connectors: Connectors,
    wires: Sequence[Wire],
) -> tuple[tuple[tuple[str, ...], ...], dict[str, Place]]:
    """Return (groups of stages that share a worker, place of every stage)."""
    wishes = {name: wish_of(graph, name, sections[name], hosts) for name in graph.topological()}
    apart = {(wire.source, wire.target) for wire in wires if connectors.kind_of(wire) not in (None, "inproc")}
    groups = groups_of(graph, sections, wishes, apart)
    joined = {group: joined_wish(group, wishes) for group in groups}
    weights = weights_of(graph)
    for group in groups:
        check_alone(group, joined[group], sections)
    nodes = {group: wish.nodes or (SERVER,) for group, wish in joined.items()}
    devices = _spread(joined, nodes, weights, hosts, sections)
    replicas = {}
    for group in groups:
        inputs = min(_MOST_INPUTS, hosts.of(nodes[group][0]).cpus + 1) if _decodes(graph, group) else 1
        replicas[group] = _replicas(group, joined[group], devices[group], sections, inputs)
    scalings = {group: wish.scaling for group, wish in joined.items()}
    most = {group: count if (scaling := scalings[group]) is None else scaling.most for group, count in replicas.items()}
    threads: dict[tuple[str, ...], int] = {}
    for node in dict.fromkeys(node for some in nodes.values() for node in some):
        here = [
            Worker(group, joined[group].threads, devices[group], count)
            for group in groups
            if (count := sum(nodes[group][index % len(nodes[group])] == node for index in range(most[group])))
        ]
        for group, number in share_threads(graph, here, hosts.of(node)).items():
            threads[group] = min(number, threads.get(group, number))
    places = {
        name: Place(
            devices[group],
            replicas[group],
            threads[group],
            0.0,
            0,
            joined[group].ranks or 1,
            joined[group].routing or (("load",) if only_reads(group) else _ROUTING),
            nodes[group],
            joined[group].scaling,
        )
        for group in groups
        for name in group
    }
    return groups, share_memory(places, sections, weights, hosts)


def _decodes(graph: StageGraph, group: tuple[str, ...]) -> bool:
    """Whether this is the worker of an input stage that decodes media."""
    return only_reads(group) and bool(graph.takes_with(group[0]) - {"text"})


def weights_of(graph: StageGraph) -> dict[str, int]:
    """Estimate the stages' need of resources relative to one another; the graph knows no sizes."""
    kinds = {name: kind_of(graph.stages[name].engine) for name in graph.topological()}
    return {name: kind.weight_of_main if name == graph.main else kind.weight for name, kind in kinds.items()}


def _spread(
    joined: Mapping[tuple[str, ...], Wish],
    nodes: Mapping[tuple[str, ...], tuple[str, ...]],
    weights: Mapping[str, int],
    hosts: Hosts,
    sections: Mapping[str, Section],
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the devices of every group: the file's, else the least loaded GPU (one per rank) that all its hosts have,
    in topological order."""
    load: Counter[tuple[str, str]] = Counter()
    """By node and device."""

    def add(group: tuple[str, ...], devices: Sequence[str]) -> None:
        for where in product(nodes[group], devices):
            load[where] += sum(weights[name] for name in group)

    for group, wish in joined.items():
        add(group, wish.devices or ())
    devices = {}
    for group, wish in joined.items():
        ranks = wish.ranks or 1
        gpus = [f"cuda:{number}" for number in range(min(len(hosts.of(node).gpus) for node in nodes[group]))]
        if wish.devices is not None:
            devices[group] = wish.devices
        elif gpus:
            busiest = {device: max(load[node, device] for node in nodes[group]) for device in gpus}
            devices[group] = tuple(sorted(sorted(gpus, key=busiest.__getitem__)[:ranks]))
            add(group, devices[group])
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


def _replicas(
    group: tuple[str, ...], wish: Wish, devices: tuple[str, ...], sections: Mapping[str, Section], default: int
) -> int:
    least = max(1, len(devices) // (wish.ranks or 1), len(wish.nodes or ()))
    most = wish.replicas if wish.scaling is None else wish.scaling.most
    if most is not None and most < least:
        path = path_of("replicas", group, sections)
        of_each = f", {wish.ranks} for each" if wish.ranks else ""
        nodes = f" and of its nodes ({', '.join(wish.nodes)})" if wish.nodes else ""
        right = f"at least {least}, the number of its devices ({', '.join(devices)}{of_each}){nodes}"
        raise wrong(path if wish.scaling is None else f"{path}.max", most, right)
    return wish.replicas or max(least, default)


def _light(graph: StageGraph, groups: Collection[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Return the workers that get no core of their own: all others if a kind is dominant, and workers that tokenize or
    encode.

    An image's time goes into tens of denoiser calls; its encoders and decoder are called once, and threads of their
    own, in addition to the denoiser's, gained nothing when measured with one client and with eight. Tokenizing takes
    only a moment per request, and audio and images are encoded in milliseconds."""
    dominant = {group for group in groups if any(kind_of(graph.stages[name].engine).dominant for name in group)}
    if dominant:
        return set(groups) - dominant
    return {group for group in groups if all(map(is_built_in, group)) and not _decodes(graph, group)}


@dataclass(frozen=True, slots=True)
class Worker:
    """The equal workers of a group of stages on one host."""

    group: tuple[str, ...]
    threads: int | None
    """None: an equal share of the cores."""
    devices: tuple[str, ...]
    count: int


def share_threads(graph: StageGraph, workers: Sequence[Worker], hardware: Hardware) -> dict[tuple[str, ...], int]:
    """Return the CPU threads per worker of one host: one each, then core by core to the worker with the fewest for its
    weight. Workers that have little to do share the cores of the others.

    With more threads than cores, every operator waits for the slowest thread, so the sum exceeds the cores only if
    there are more workers than cores, or the file says so.
    """
    weights, light = weights_of(graph), _light(graph, [worker.group for worker in workers])
    threads = {worker.group: worker.threads or 1 for worker in workers}
    sharing = [worker for worker in workers if worker.threads is None and worker.group not in light]
    weight = {
        worker.group: sum(weights[name] for name in worker.group) if CPU in worker.devices else 1 for worker in sharing
    }
    most = {worker.group: hardware.cpus if CPU in worker.devices else _MOST_GPU_THREADS for worker in sharing}
    # replicas of input stages are for slow files, not for parallel work
    counted = {worker.group: 1 if only_reads(worker.group) else worker.count for worker in workers}
    left = hardware.cpus - sum(threads[group] * count for group, count in counted.items() if group not in light)
    while hungry := [group for group in weight if threads[group] < most[group] and counted[group] <= left]:
        group = max(hungry, key=lambda group: weight[group] / threads[group])
        threads[group] += 1
        left -= counted[group]
    return threads
