"""The further ranks of denoisers, each a process that is forked from one which has read the libraries.

`python row_rank_process.py FD`: over the socket FD come jobs (JSON, with a socket to rank 0 for each rank from 1
on); when all ranks of one have ended, their exit codes go back.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from diffusion_chain import Untimed

from segue.engines.diffusion.contract import DenoiserContext, DiffusionModel
from segue.engines.diffusion.engine import DiffusionEngine
from segue.engines.diffusion.sharing import Sharing
from segue.engines.ranks import Leading, LedAdapters, follow
from segue.graph.deployment.options import LoraPlan
from segue.models.registry import family_of, read_config
from segue.parallel.ranks import Ranks
from segue.parallel.ways import Shape, Ways, meet

CPU = torch.device("cpu")
MOST = 8
"""Ranks besides the leader."""
WAYS = {"cfg_parallel": "branches", "sequence_parallel": "tokens", "tensor_parallel": "weights"}


def shape_of(keys: dict[str, Any]) -> Shape:
    """`keys`: of a deployment, and of `DenoiserContext`; two branches where they say nothing."""
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

    if not hasattr(torch.compiler, "set_default_backend"):
        pytest.skip(f"torch {torch.__version__} compiles with no other backend")
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(kept)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", "true")  # nothing is given to it
            yield graphs
    finally:
        torch.compiler.set_default_backend(before)


def denoiser(checkpoint: Path, keys: dict[str, Any], ways: Ways) -> DiffusionModel:
    """One rank's; `keys`: as above, `lora` as a mapping."""
    given = {key: value for key, value in keys.items() if key not in WAYS}
    if "lora" in keys:
        given["lora"] = LoraPlan(**keys["lora"])
    adapters = family_of(read_config(checkpoint), checkpoint).load_stages().STAGE_MODELS
    loaded: DiffusionModel = adapters["denoiser"](
        DenoiserContext(checkpoint, "denoiser", CPU, torch.float32, ways=ways, **given)
    )
    return loaded


def ranked(model: DiffusionModel, ways: Ways, ranks: Ranks) -> DiffusionEngine:
    """A rank's engine."""
    return DiffusionEngine(model, None, Sharing(model, ways, ranks), ranks)


class Led(Leading):
    """Rank 0's engine over a denoiser."""

    def __init__(self, model: DiffusionModel, ways: Ways, ends: list[socket.socket]) -> None:
        self.model = model
        self.ranks = Ranks(ways.everyone, ends)
        engine = ranked(model, ways, self.ranks)
        engine.costs = Untimed()
        super().__init__(engine, self.ranks, compared_every=2)
        host = getattr(model, "lora", None)
        self.lora = None if host is None else LedAdapters(host, self.ranks)


class Followers:
    """The test's side."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(240)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    @contextmanager
    def led(self, inner: DiffusionModel, checkpoint: Path, meeting: Path) -> Iterator[Led]:
        """A leader over `inner`, with a follower that has loaded `checkpoint`. It has ended when this does."""
        with self.joined(checkpoint, meeting, {}, lambda ways: inner) as leader:
            yield leader

    @contextmanager
    def joined(
        self,
        checkpoint: Path,
        meeting: Path,
        keys: dict[str, Any],
        make: Callable[[Ways], DiffusionModel] | None = None,
        *,
        follower: Path | None = None,
    ) -> Iterator[Led]:
        """A leader and the followers of a denoiser; `keys`: by which its calls are divided, and of `DenoiserContext`.
        `make`: the leader's own adapter; `follower`: another checkpoint, which the last rank loads."""
        shape = shape_of(keys)
        pairs = [socket.socketpair() for _ in range(1, shape.size)]
        loaded = [checkpoint] * (len(pairs) - 1) + [follower or checkpoint]
        job = {"meeting": str(meeting), "keys": keys, "checkpoints": [str(path) for path in loaded]}
        socket.send_fds(self._control, [json.dumps(job).encode()], [far.fileno() for _, far in pairs])
        for _, far in pairs:
            far.close()
        near = [near for near, _ in pairs]
        ways = meet(0, shape, meeting, CPU)
        try:
            inner = denoiser(checkpoint, keys, ways) if make is None else make(ways)
            yield Led(inner, ways, near)
        finally:
            for end in near:
                end.close()
            assert json.loads(self._control.recv(4096)) == [0] * len(pairs)
            if ways.tokens is not None:
                ways.tokens.close_default()

    def close(self) -> None:
        self._control.close()
        assert self._process.wait(timeout=240) == 0


def live(rank: int, job: dict[str, Any], end: int) -> NoReturn:
    """The child's side of the fork."""
    code = 1
    try:
        keys = job["keys"]
        with ExitStack() as stack:
            if "compile" in keys:
                stack.enter_context(compiled_eagerly())
            near = stack.enter_context(socket.socket(fileno=end))
            stack.enter_context(torch.inference_mode())
            ways = meet(rank, shape_of(keys), Path(job["meeting"]), CPU)
            model = denoiser(Path(job["checkpoints"][rank - 1]), keys, ways)
            ranks = Ranks(ways.everyone, [near])
            follow(ranked(model, ways, ranks), ranks, getattr(model, "lora", None))
        code = 0
    except BaseException:
        traceback.print_exc()  # the leader sees that it failed by `code`, and why is here
    finally:
        os._exit(code)  # as a worker's followers end


def main() -> None:
    torch.set_num_threads(1)
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, ends, _, _ = socket.recv_fds(control, 1 << 16, MOST)
        if not data:
            return
        job = json.loads(data)
        for path in map(Path, job["checkpoints"]):
            family_of(read_config(path), path).load_stages()  # once: those that are forked have it
        children = []
        for rank, end in enumerate(ends, start=1):
            if not (child := os.fork()):
                control.close()
                for other in ends:
                    if other != end:
                        os.close(other)
                live(rank, job, end)
            children.append(child)
        for end in ends:
            os.close(end)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        control.send(json.dumps(codes).encode())


if __name__ == "__main__":
    main()
