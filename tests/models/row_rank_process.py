"""The second rank of a denoiser: `python row_rank_process.py FD CHECKPOINT MEETING KEYS` follows the leader at FD."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.engines.diffusion.contract import DiffusionAdapter
from segue.engines.diffusion.ranks import RowLeader
from segue.engines.diffusion.row_follower import follow_rows
from segue.graph.lora import LoraPlan
from segue.models.registry import family_of, read_config
from segue.parallel.group import Group
from segue.parallel.orders import Crew

CPU = torch.device("cpu")


def denoiser(checkpoint: Path, keys: dict[str, Any], group: Group) -> DiffusionAdapter:
    """One rank's; `keys`: of `LoadContext`, `lora` as a mapping."""
    lora = {"lora": LoraPlan(**keys["lora"])} if "lora" in keys else {}
    adapters = family_of(read_config(checkpoint), checkpoint).load_stages().ADAPTERS
    loaded: DiffusionAdapter = adapters["denoiser"](
        LoadContext(checkpoint, "denoiser", CPU, torch.float32, group=group, **{**keys, **lora})
    )
    return loaded


def divides(keys: dict[str, Any]) -> bool:
    """They divide the network."""
    return bool(keys.keys() & {"sequence_parallel", "tensor_parallel"})


@contextmanager
def led(inner: DiffusionAdapter, checkpoint: Path, meeting: Path) -> Iterator[RowLeader]:
    """A leader over `inner`, with a follower that has loaded `checkpoint`. It has ended when this does."""
    with joined(checkpoint, meeting, {}, lambda group: inner) as leader:
        yield leader


@contextmanager
def joined(
    checkpoint: Path,
    meeting: Path,
    keys: dict[str, Any],
    make: Callable[[Group], DiffusionAdapter] | None = None,
    *,
    follower: Path | None = None,
) -> Iterator[RowLeader]:
    """A leader and a follower of a denoiser; `keys` (of `LoadContext`): none, or by which its network is divided.
    `make`: the leader's own adapter; `follower`: another checkpoint, which it loads."""
    orders, far = socket.socketpair()
    with far:
        command = [sys.executable, __file__, str(far.fileno()), str(follower or checkpoint), str(meeting)]
        command.append(json.dumps(keys))
        process = subprocess.Popen(command, pass_fds=[far.fileno()])
    crew = Crew([orders])
    group = Group(0, 2, meeting, CPU)
    try:
        inner = denoiser(checkpoint, keys, group) if make is None else make(group)
        yield RowLeader(inner, group, crew, divided=divides(keys))
    finally:
        crew.close()
        assert process.wait(timeout=240) == 0
        group.close_default()


def main() -> None:
    torch.set_num_threads(1)
    checkpoint, meeting = Path(sys.argv[2]), Path(sys.argv[3])
    keys = json.loads(sys.argv[4])
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        group = Group(1, 2, meeting, CPU)
        follow_rows(denoiser(checkpoint, keys, group), group, orders, divided=divides(keys))
    os._exit(0)  # as a worker's followers end


if __name__ == "__main__":
    main()
