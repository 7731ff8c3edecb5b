"""Which stages share a worker, and what each gets of the machine: devices, memory, threads."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from segue.graph.deployment import Hardware
from segue.graph.section import Section, wrong
from segue.graph.stage_graph import INPUT, Stage, StageGraph
from segue.graph.wiring import Connectors
from segue.graph.written import RANK_KEYS, Wire
from segue.messages.errors import ConfigError, nearest

CPU = "cpu"
_POOL = 0.9
"""Of a device's memory, what stages get where the file leaves it to us: the rest is for contexts and fragmentation."""
_CPU_POOL = 0.4
"""Of the machine's memory: it is rarely ours alone, and shared-memory slots come on top."""
_SMALLEST_SHARE = 0.005
_MOST_GPU_THREADS = 4
"""A worker whose network runs on a GPU only feeds it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage runs. Stages of one group differ in `memory_share` and `memory_bytes` only."""

    devices: tuple[str, ...]
    replicas: int
    threads: int
    memory_share: float
    memory_bytes: int
    ranks: int = 1
    """Processes of each replica; `memory_bytes` is for one of them."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the file says of a stage, or a group of stages; None: nothing."""

    devices: tuple[str, ...] | None
    replicas: int | None
    threads: int | None
    ranks: int | None

    def shown(self) -> dict[str, str]:
        """What is said, for people."""
        said = {"devices": ", ".join(self.devices or ()), "replicas": self.replicas, "threads": self.threads}
        said["processes per replica"] = self.ranks
        return {key: str(value) for key, value in said.items() if value}

    def clash(self, other: _Wish) -> str | None:
        """The key the two disagree on."""
        mine, theirs = self.shown(), other.shown()
        return next((key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]), None)

    def join(self, other: _Wish) -> _Wish:
        return _Wish(
            self.devices or other.devices,
            self.replicas or other.replicas,
            self.threads or other.threads,
            self.ranks or other.ranks,
        )


def place(
    graph: StageGraph,
    sections: Mapping[str, Section],
    hardware: Hardware,
    connectors: Connectors,
    wires: Sequence[Wire],
) -> tuple[tuple[tuple[str, ...], ...], dict[str, Place]]:
    """(groups of stages that share a worker, place of every stage)."""
    wishes = {name: _wish(graph, name, sections[name], hardware) for name in graph.topological()}
    apart = {(wire.source, wire.target) for wire in wires if connectors.kind_of(wire) == "shm"}
    groups = _groups(graph, sections, wishes, apart)
    joined = {group: _joined(group, wishes) for group in groups}
    weights = {name: _weight(graph.stages[name], graph.main) for name in wishes}
    for group in groups:
        _check_alone(group, joined[group], sections)
    devices = _spread(joined, weights, hardware, sections)
    replicas = {group: _replicas(group, joined[group], devices[group], sections) for group in groups}
    threads = _threads(joined, devices, replicas, weights, hardware, _light(graph, groups))
    places = {
        name: Place(devices[group], replicas[group], threads[group], 0.0, 0, joined[group].ranks or 1)
        for group in groups
        for name in group
    }
    return groups, _share_memory(places, sections, weights, hardware)


# --- what the file says


def _wish(graph: StageGraph, name: str, section: Section, hardware: Hardware) -> _Wish:
    devices = _devices(section, hardware)
    if name == INPUT:
        if devices not in (None, (CPU,)):
            raise wrong(section.at("devices"), section.values["devices"], "cpu: the input stage runs on the CPU")
        devices = (CPU,)
    ranks = _ranks(graph, graph.stages[name], section)
    return _Wish(devices, section.integer("replicas", None), section.integer("threads", None), ranks)


def _ranks(graph: StageGraph, stage: Stage, section: Section) -> int | None:
    """Processes per replica; the defaults mean only stages of the key's engine."""
    if stage.engine == "diffusion":
        ways = denoiser_ways(section)
        return math.prod(ways.values()) if ways else None
    ranks = section.integer("tensor_parallel", None)
    if stage.engine != "autoregressive" or ranks in (None, 1):
        return None
    if not stage.divisible:
        path, _ = section.find("tensor_parallel")
        raise ConfigError(
            f"{path} is {ranks}, but the weights of stage {stage.name!r} of {graph.name!r} cannot be divided; "
            "it must be 1",
            field=path,
        )
    return ranks


def denoiser_ways(section: Section) -> dict[str, int]:
    """What is said of several processes, by key: the ways multiply. What `defaults` say of `tensor_parallel` is for
    language models."""
    keys = [key for key in RANK_KEYS if key != "tensor_parallel" or key in section.values]
    said = {key: section.integer(key, None) for key in keys}
    return {key: ranks for key, ranks in said.items() if ranks is not None and ranks > 1}


def _check_alone(group: tuple[str, ...], wish: _Wish, sections: Mapping[str, Section]) -> None:
    """A worker of several processes has one stage."""
    if wish.ranks and len(group) > 1:
        path, said = _said_of_ranks(group, sections)
        raise ConfigError(
            f"{said} is {wish.ranks}, but {' and '.join(map(repr, group))} share a worker; set their fuse_with to null",
            field=path,
        )


def _said_of_ranks(group: tuple[str, ...], sections: Mapping[str, Section]) -> tuple[str, str]:
    """Where it is written that a replica of a group has several processes: the first path, and all for people."""
    said = [(key, *sections[name].find(key)) for key in reversed(RANK_KEYS) for name in group]
    keys, paths = zip(*((key, path) for key, path, value in said if value not in (None, 1)), strict=True)
    return paths[0], " x ".join([paths[0], *keys[1:]])


def _path_of(key: str, group: tuple[str, ...], sections: Mapping[str, Section]) -> str:
    """Where a key of a group is written."""
    return next(path for name in group for path, value in [sections[name].find(key)] if value is not None)


def _devices(section: Section, hardware: Hardware) -> tuple[str, ...] | None:
    path, value = section.find("devices")
    if value is None or value == "auto":
        return None
    known = (CPU, *(f"cuda:{number}" for number in range(len(hardware.gpus))))
    devices = value if isinstance(value, list) else [value]
    right = "'auto', 'cpu', 'cuda:N', or a list of devices of one kind"
    if not devices or not all(isinstance(device, str) for device in devices):
        raise wrong(path, value, right)
    for device in devices:
        if device not in known:
            has = f"{len(hardware.gpus)} GPUs" if hardware.gpus else "no GPU"
            raise ConfigError(
                f"{path} names {device!r}, but this machine has {has}{nearest(device, known)}",
                field=path,
            )
    if len(set(devices)) < len(devices) or (CPU in devices and len(devices) > 1):
        raise wrong(path, value, f"{right}, each once")
    return tuple(devices)


# --- groups


def _groups(
    graph: StageGraph, sections: Mapping[str, Section], wishes: Mapping[str, _Wish], apart: set[tuple[str, str]]
) -> tuple[tuple[str, ...], ...]:
    """What the file fuses, then what the graph suggests and the file does not speak against."""
    group_of: dict[str, tuple[str, ...]] = {name: (name,) for name in wishes}

    def fuse(name: str, other: str) -> None:
        members = {*group_of[name], *group_of[other]}
        group = tuple(member for member in wishes if member in members)
        group_of.update(dict.fromkeys(group, group))

    for name in wishes:
        other = _fused_with(graph, name, sections[name])
        if other is not None:
            _check_fusible(name, other, sections, _joined(group_of[name], wishes), _joined(group_of[other], wishes))
            fuse(name, other)
    for name in wishes:
        suggested = graph.stages[name].fuse_with
        if suggested is None or sections[name].says("fuse_with"):
            continue
        members = {*group_of[name], *group_of[suggested]}
        clash = _joined(group_of[name], wishes).clash(_joined(group_of[suggested], wishes))
        if clash is None and not any(source in members and target in members for source, target in apart):
            fuse(name, suggested)
    return tuple(dict.fromkeys(group_of.values()))


def _fused_with(graph: StageGraph, name: str, section: Section) -> str | None:
    path, other = section.find("fuse_with")
    if other is None:
        return None
    if not isinstance(other, str):
        raise wrong(path, other, "the name of a stage")
    if other not in graph.stages:
        hint = nearest(other, [stage for stage in graph.stages if stage != name])
        raise ConfigError(f"{path} is {other!r}, which is no stage of {graph.name!r}{hint}", field=path)
    if other == name:
        if "fuse_with" in section.values:
            raise wrong(path, other, "another stage")
        return None  # the defaults fuse all others with this one
    return other


def _check_fusible(name: str, other: str, sections: Mapping[str, Section], mine: _Wish, theirs: _Wish) -> None:
    key = mine.clash(theirs)
    if key is not None:
        path, _ = sections[name].find("fuse_with")
        raise ConfigError(
            f"{path} is {other!r}, but {name!r} has {key} {mine.shown()[key]} and {other!r} has {theirs.shown()[key]}; "
            f"fused stages share a worker, so they must agree",
            field=path,
        )


def _joined(group: Sequence[str], wishes: Mapping[str, _Wish]) -> _Wish:
    wish = wishes[group[0]]
    for name in group[1:]:
        wish = wish.join(wishes[name])
    return wish


# --- what each group gets


def _weight(stage: Stage, main: str) -> int:
    """How much of a machine a stage is likely to need, next to the others. A guess: the graph knows no sizes."""
    if stage.engine == "module":
        return 1
    return 6 if stage.name == main else 3


def _spread(
    joined: Mapping[tuple[str, ...], _Wish],
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
            path, said = _said_of_ranks(group, sections)
            raise ConfigError(
                f"{said} is {ranks}, but the stage has {len(devices[group])} GPUs ({', '.join(devices[group])}); "
                "their number must be a multiple of it",
                field=path,
            )
    return devices


def _replicas(group: tuple[str, ...], wish: _Wish, devices: tuple[str, ...], sections: Mapping[str, Section]) -> int:
    least = max(1, len(devices) // (wish.ranks or 1))
    if wish.replicas is not None and wish.replicas < least:
        path = _path_of("replicas", group, sections)
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
    joined: Mapping[tuple[str, ...], _Wish],
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


# --- memory


def _share_memory(
    places: Mapping[str, Place], sections: Mapping[str, Section], weights: Mapping[str, int], hardware: Hardware
) -> dict[str, Place]:
    """Every place with its share: what the file says, then what it leaves, by weight.

    The input stage sizes nothing by its share, so it gets none by itself.
    """
    said = {name: sections[name].number("memory_share", None, most=1.0) for name in places}
    fair: dict[str, list[float]] = {name: [] for name in places}
    for device in dict.fromkeys(device for one in places.values() for device in one.devices):
        here = {name: _replicas_on(one, device) for name, one in places.items() if device in one.devices}
        explicit = sum(share * count for name, count in here.items() if (share := said[name]) is not None)
        if explicit > 1.0 + 1e-9:
            _over(device, here, said, sections)
        silent = {name: weights[name] * count for name, count in here.items() if said[name] is None and name != INPUT}
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
            size //= one.ranks  # they share what is one replica's
        shared[name] = replace(one, memory_share=share, memory_bytes=size)
    return shared


def _replicas_on(one: Place, device: str) -> int:
    """Of a device's memory: on a CPU the ranks of a replica share one share."""
    processes = one.replicas if device == CPU else one.replicas * one.ranks
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
