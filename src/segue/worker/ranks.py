"""The ranks of a replica with several processes: the worker leads, and forks one follower per further rank.

It forks them before it has a thread or a socket of its own. If a follower ends, the worker ends too and is restarted
with all its ranks, like any worker; the kernel kills the followers of a worker that ends.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
from functools import partial
from pathlib import Path

import msgspec
import torch

from segue.engines.autoregressive.parallel.follower import follow
from segue.engines.contract import LoadContext
from segue.engines.diffusion.follower import follow_rows
from segue.graph.deployment.deployment import StagePlan
from segue.kernels.attention.backends import attention_backend
from segue.kernels.device import give_back
from segue.messages.errors import ConfigError
from segue.messages.process import WorkerSpec
from segue.models.registry import families
from segue.parallel.group import Group
from segue.parallel.orders import Crew, dtype_of
from segue.parallel.ways import Shape, meet
from segue.worker.device import work_on
from segue.worker.processes import live

log = logging.getLogger(__name__)

_LAST_WORDS = 60.0
"""Seconds for a worker to report why it cannot start, after a follower has ended for the same reason."""


class Ranks:
    """The leader's side. `fork_ranks` makes it; call `meet` once the worker can report, `serve` when it is ready."""

    def __init__(self, plan: StagePlan, pids: list[int], sockets: list[socket.socket], meeting: Path) -> None:
        self.plan = plan
        self.crew = Crew(sockets)
        self._pids = pids
        self._meeting = meeting
        self._serving = False
        self._over = threading.Event()

    def meet(self, context: LoadContext) -> None:
        """Wait for the followers, monitor them from now on, and set the groups of `context`."""
        threading.Thread(target=self._watch, name="followers", daemon=True).start()
        _meet(context, self.plan, 0, self._meeting)

    def serve(self) -> None:
        """Record that the worker is ready."""
        self._serving = True

    def close(self) -> None:
        """End the followers when the worker ends by itself."""
        self._over.set()
        self.crew.close()
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)

    def _watch(self) -> None:
        """End this process when a follower has ended."""
        poll = select.poll()
        for pid in self._pids:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        poll.poll()
        if not self._over.wait(0 if self._serving else _LAST_WORDS):
            log.error("a follower of this worker has ended, so the worker ends too")
            os._exit(1)


def fork_ranks(spec: WorkerSpec) -> Ranks | None:
    """Fork the followers of a worker whose stage has several processes; None for any other. Only the leader returns."""
    plans = [msgspec.convert(stage, StagePlan) for stage in spec.stages]
    plan = plans[0]
    if plan.ranks == 1:
        return None
    meeting = Path(spec.connector).parent / f"{spec.worker}.ranks"
    pids: list[int] = []
    sockets: list[socket.socket] = []
    leader = os.getpid()
    for rank in range(1, plan.ranks):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for end in (*sockets, ours):
                end.close()
            live(leader, f"segue-{spec.worker}+{rank}", partial(_follow, spec, plan, rank, theirs, meeting))
        theirs.close()
        pids.append(pid)
        sockets.append(ours)
    return Ranks(plan, pids, sockets, meeting)


def threads_of(plan: StagePlan) -> int:
    """Return the CPU threads of each rank."""
    return max(1, plan.threads // plan.ranks)


def shape_of(plan: StagePlan) -> Shape:
    """Return how the ranks of a denoiser divide its calls."""
    return Shape(plan.cfg_parallel, plan.sequence_parallel, plan.tensor_parallel)


def load_context(spec: WorkerSpec, plan: StagePlan, rank: int = 0) -> LoadContext:
    """Make the context from which a stage model is built, without fields that only some stages or ranks have. Raises
    `ConfigError` for keys that its device does not support."""
    device = torch.device(plan.device_of(spec.replica, rank))
    if plan.offload != "none" and device.type == "cpu":
        raise ConfigError(
            f"stage {plan.name!r}: offload is {plan.offload!r}, but the stage runs on the CPU, where its weights are "
            "already; it must be none",
            field=f"stages.{plan.name}.offload",
        )
    return LoadContext(
        model_dir=Path(spec.model_dir),
        stage=plan.name,
        device=device,
        dtype=dtype_of(plan.dtype),
        load_format=spec.load_format if plan.load_format == "auto" else plan.load_format,
        max_model_len=plan.max_model_len,
        quantization=plan.quantization,
        gguf=dict(plan.gguf),
        attention=plan.attention,
        compile=plan.compile,
        offload=plan.offload,
        sequence_ring=plan.sequence_ring,
        lora=plan.lora,
        fused=not (plan.enforce_eager or plan.compile),
        recorded=not plan.enforce_eager,
        options=dict(plan.options),
    )


def _meet(context: LoadContext, plan: StagePlan, rank: int, meeting: Path) -> None:
    """Wait for the other ranks. This process uses only one device."""
    device = context.device
    work_on(device)  # NCCL allocates its buffers there
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # ranks are on one machine
    if plan.engine == "diffusion":
        context.ways = meet(rank, shape_of(plan), meeting, device)
    else:
        context.group = Group(rank, plan.ranks, meeting, device)


def _follow(spec: WorkerSpec, plan: StagePlan, rank: int, orders: socket.socket, meeting: Path) -> None:
    """Run a follower. If it cannot load the stage, the leader usually cannot either, and reports the error."""
    torch.set_num_threads(threads_of(plan))
    context = load_context(spec, plan, rank)
    _meet(context, plan, rank, meeting)
    adapter = families()[spec.family].load_stages().STAGE_MODELS[plan.name](context)
    give_back()
    if context.ways is not None:
        follow_rows(adapter, context.ways, orders)
        return
    assert context.group is not None, "ranks have met"
    kernel = "torch" if plan.deterministic else plan.attention
    follow(adapter, context.group, orders, attention_backend(kernel, context.device, plan.block_size))
