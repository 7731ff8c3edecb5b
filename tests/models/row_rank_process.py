"""The further ranks of a denoiser: `python row_rank_process.py MEETING KEYS FD=CHECKPOINT …`, of rank 1 and on, each of
which follows the leader at its FD. One process reads the libraries, and forks the others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.engines.contract import LoadContext
from segue.engines.diffusion.contract import DiffusionAdapter
from segue.engines.diffusion.ranks import RowLeader
from segue.engines.diffusion.row_follower import follow_rows
from segue.graph.lora import LoraPlan
from segue.models.registry import family_of, read_config
from segue.parallel.orders import Crew
from segue.parallel.ways import Shape, Ways, meet

CPU = torch.device("cpu")
WAYS = {"cfg_parallel": "branches", "sequence_parallel": "tokens", "tensor_parallel": "weights"}


def shape_of(keys: dict[str, Any]) -> Shape:
    """`keys`: of a deployment, and of `LoadContext`; two branches where they say nothing."""
    parts = {part: keys[key] for key, part in WAYS.items() if key in keys}
    return Shape(**parts) if parts else Shape(branches=2)


@contextmanager
def compiled_eagerly() -> Iterator[list[torch.fx.GraphModule]]:
    """Within it, compiled code is what was traced, without the minute that it takes to be made better; all that is
    traced comes into the list."""
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(kept)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", "true")  # nothing is given to it
            yield graphs
    finally:
        torch.compiler.set_default_backend(before)


def denoiser(checkpoint: Path, keys: dict[str, Any], ways: Ways) -> DiffusionAdapter:
    """One rank's; `keys`: as above, `lora` as a mapping."""
    given = {key: value for key, value in keys.items() if key not in WAYS}
    if "lora" in keys:
        given["lora"] = LoraPlan(**keys["lora"])
    adapters = family_of(read_config(checkpoint), checkpoint).load_stages().ADAPTERS
    loaded: DiffusionAdapter = adapters["denoiser"](
        LoadContext(checkpoint, "denoiser", CPU, torch.float32, ways=ways, **given)
    )
    return loaded


@contextmanager
def led(inner: DiffusionAdapter, checkpoint: Path, meeting: Path) -> Iterator[RowLeader]:
    """A leader over `inner`, with a follower that has loaded `checkpoint`. It has ended when this does."""
    with joined(checkpoint, meeting, {}, lambda ways: inner) as leader:
        yield leader


@contextmanager
def joined(
    checkpoint: Path,
    meeting: Path,
    keys: dict[str, Any],
    make: Callable[[Ways], DiffusionAdapter] | None = None,
    *,
    follower: Path | None = None,
) -> Iterator[RowLeader]:
    """A leader and the followers of a denoiser; `keys`: by which its calls are divided, and of `LoadContext`.
    `make`: the leader's own adapter; `follower`: another checkpoint, which the last rank loads."""
    shape = shape_of(keys)
    pairs = [socket.socketpair() for _ in range(1, shape.size)]
    loaded = [checkpoint] * (len(pairs) - 1) + [follower or checkpoint]
    ranks = [f"{far.fileno()}={path}" for (_, far), path in zip(pairs, loaded, strict=True)]
    command = [sys.executable, __file__, str(meeting), json.dumps(keys), *ranks]
    process = subprocess.Popen(command, pass_fds=[far.fileno() for _, far in pairs])
    for _, far in pairs:
        far.close()
    crew = Crew([near for near, _ in pairs])
    ways = meet(0, shape, meeting, CPU)
    try:
        inner = denoiser(checkpoint, keys, ways) if make is None else make(ways)
        yield RowLeader(inner, ways, crew)
    finally:
        crew.close()
        assert process.wait(timeout=240) == 0
        if ways.tokens is not None:
            ways.tokens.close_default()


def main() -> None:
    torch.set_num_threads(1)
    meeting, keys = Path(sys.argv[1]), json.loads(sys.argv[2])
    given = [pair.split("=", 1) for pair in sys.argv[3:]]
    rank, children = 1, set[int]()
    for other in range(2, len(given) + 1):
        if child := os.fork():
            children.add(child)
        else:
            rank, children = other, set()
            break
    for other, (end, _) in enumerate(given, start=1):
        if other != rank:
            os.close(int(end))
    with ExitStack() as stack:
        if "compile" in keys:
            stack.enter_context(compiled_eagerly())
        orders = stack.enter_context(socket.socket(fileno=int(given[rank - 1][0])))
        ways = meet(rank, shape_of(keys), meeting, CPU)
        follow_rows(denoiser(Path(given[rank - 1][1]), keys, ways), ways, orders)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os._exit(max(map(abs, codes), default=0))  # as a worker's followers end


if __name__ == "__main__":
    main()
