"""What a deployment file says of where a stage runs, or a group of stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segue.graph.deployment import Hardware
from segue.graph.section import Section, wrong
from segue.graph.stage_graph import INPUT, Stage, StageGraph
from segue.graph.written import RANK_KEYS
from segue.messages.errors import ConfigError, nearest

CPU = "cpu"
MOST_THREADS = 1024
"""Of a worker: many more, and the runtime that starts them dies."""


@dataclass(frozen=True, slots=True)
class Wish:
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

    def clash(self, other: Wish) -> str | None:
        """The key the two disagree on."""
        mine, theirs = self.shown(), other.shown()
        return next((key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]), None)

    def join(self, other: Wish) -> Wish:
        return Wish(
            self.devices or other.devices,
            self.replicas or other.replicas,
            self.threads or other.threads,
            self.ranks or other.ranks,
        )


def joined_wish(group: Sequence[str], wishes: Mapping[str, Wish]) -> Wish:
    wish = wishes[group[0]]
    for name in group[1:]:
        wish = wish.join(wishes[name])
    return wish


def wish_of(graph: StageGraph, name: str, section: Section, hardware: Hardware) -> Wish:
    devices = _devices(section, hardware)
    if name == INPUT:
        if devices not in (None, (CPU,)):
            raise wrong(section.at("devices"), section.values["devices"], "cpu: the input stage runs on the CPU")
        devices = (CPU,)
    ranks = _ranks(graph, graph.stages[name], section)
    threads = section.integer("threads", None, most=MOST_THREADS)
    return Wish(devices, section.integer("replicas", None), threads, ranks)


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


def said_of_ranks(group: tuple[str, ...], sections: Mapping[str, Section]) -> tuple[str, str]:
    """Where it is written that a replica of a group has several processes: the first path, and all for people."""
    said = [(key, *sections[name].find(key)) for key in reversed(RANK_KEYS) for name in group]
    keys, paths = zip(*((key, path) for key, path, value in said if value not in (None, 1)), strict=True)
    return paths[0], " x ".join([paths[0], *keys[1:]])


def path_of(key: str, group: tuple[str, ...], sections: Mapping[str, Section]) -> str:
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
