"""The second rank of a denoiser: `python row_rank_process.py FD CHECKPOINT MEETING` follows the leader at socket FD."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from segue.engines.contract import LoadContext
from segue.engines.diffusion.contract import DiffusionAdapter
from segue.engines.diffusion.ranks import RowLeader, follow_rows
from segue.models.registry import family_of, read_config
from segue.parallel.group import Group
from segue.parallel.orders import Crew

CPU = torch.device("cpu")


@contextmanager
def led(inner: DiffusionAdapter, checkpoint: Path, meeting: Path) -> Iterator[RowLeader]:
    """A leader over `inner`, with a follower that has loaded `checkpoint`. It has ended when this does."""
    orders, far = socket.socketpair()
    with far:
        command = [sys.executable, __file__, str(far.fileno()), str(checkpoint), str(meeting)]
        process = subprocess.Popen(command, pass_fds=[far.fileno()])
    crew = Crew([orders])
    try:
        yield RowLeader(inner, Group(0, 2, meeting, CPU), crew)
    finally:
        crew.close()
        assert process.wait(timeout=60) == 0


def main() -> None:
    torch.set_num_threads(1)
    checkpoint, meeting = Path(sys.argv[2]), Path(sys.argv[3])
    config = read_config(checkpoint)
    adapters = family_of(config, checkpoint).load_stages().ADAPTERS
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        group = Group(1, 2, meeting, CPU)
        follow_rows(adapters["denoiser"](LoadContext(checkpoint, "denoiser", CPU, torch.float32)), group, orders)


if __name__ == "__main__":
    main()
