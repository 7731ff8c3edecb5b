"""The processes of a replica with several ranks: the worker is rank 0, and forks one follower per further rank.

It forks them before it has a thread or a socket of its own. If a follower ends, the worker ends too and is restarted
with all its ranks, like any worker; the kernel kills the followers of a worker that ends.

Optional reading: a worker of one rank has none.
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

import torch

from segue.engines.autoregressive.contract import LoraHost, TakesLora
from segue.engines.contract import Engine, LoadContext
from segue.engines.ranks import Leading, LedAdapters, RankedEngine, follow
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.kinds.registry import plan_from
from segue.graph.parts import own_name
from segue.kernels.device import give_back
from segue.messages.process import WorkerSpec
from segue.models.registry import families
from segue.parallel.ranks import ALONE, Ranks
from segue.parallel.wire import dtype_of
from segue.worker.kinds.kind import Host, worker_kind
from segue.worker.process.device import work_on
from segue.worker.process.processes import live

log = logging.getLogger(__name__)

_LAST_WORDS = 60.0
"""Seconds for a worker to report why it cannot start, after a follower has ended for the same reason."""


class Followers:
    """Rank 0's side. `fork_ranks` makes it; call `meet` once the worker can report, `serve` when it is ready."""

    def __init__(self, plan: StagePlan, pids: list[int], sockets: list[socket.socket], meeting: Path) -> None:
        self.plan = plan
        self.link = ALONE
        """Rank 0's link to the others, once they have met."""
        self._sockets = sockets
        self._pids = pids
        self._meeting = meeting
        self._serving = False
        self._over = threading.Event()

    def meet(self, context: LoadContext) -> None:
        """Wait for the followers, monitor them from now on, and set the groups of `context`."""
        threading.Thread(target=self._watch, name="followers", daemon=True).start()
        self.link = _meet(context, self.plan, 0, self._meeting, self._sockets)

    def leading(self, engine: Engine) -> Engine:
        """Return rank 0's engine, which the followers' repeat."""
        assert isinstance(engine, RankedEngine)
        return Leading(engine, self.link)

    def adapters(self, host: LoraHost) -> LoraHost:
        """Return the host of rank 0's adapters, which the followers' repeats."""
        return LedAdapters(host, self.link)

    def serve(self) -> None:
        """Record that the worker is ready."""
        self._serving = True

    def close(self) -> None:
        """End the followers when the worker ends by itself."""
        self._over.set()
        for end in self._sockets:
            end.close()
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


def fork_ranks(spec: WorkerSpec) -> Followers | None:
    """Fork the followers of a worker whose stage has several processes; None for any other. Only the leader returns."""
    plans = [plan_from(stage) for stage in spec.stages]
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
    return Followers(plan, pids, sockets, meeting)


def threads_of(plan: StagePlan) -> int:
    """Return the CPU threads of each rank."""
    return max(1, plan.threads // plan.ranks)


def load_context(spec: WorkerSpec, plan: StagePlan, rank: int = 0) -> LoadContext:
    """Make the context from which a stage model is built, without its process groups. Raises `ConfigError` for
    keys that its device does not support."""
    base = LoadContext(
        model_dir=Path(spec.model_dir),
        stage=own_name(plan.name),
        device=torch.device(plan.device_of(spec.replica, rank)),
        dtype=dtype_of(plan.dtype),
        load_format=spec.load_format if plan.load_format == "auto" else plan.load_format,
        lora=plan.lora,
        skip_tokenizer_init=spec.skip_tokenizer_init,
        options=dict(plan.options),
    )
    context: LoadContext = worker_kind(plan.engine).context(base, plan)
    return context


def _meet(context: LoadContext, plan: StagePlan, rank: int, meeting: Path, ends: list[socket.socket]) -> Ranks:
    """Wait for the other ranks, and return the link to them. This process uses only one device."""
    device = context.device
    work_on(device)  # NCCL allocates its buffers there
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # ranks are on one machine
    meet = worker_kind(plan.engine).meet
    assert meet is not None, "only kinds with ranks have plans with several"
    return Ranks(meet(context, plan, rank, meeting), ends)


def _follow(spec: WorkerSpec, plan: StagePlan, rank: int, end: socket.socket, meeting: Path) -> None:
    """Run a follower. If it cannot load the stage, the leader usually cannot either, and reports the error."""
    torch.set_num_threads(threads_of(plan))
    context = load_context(spec, plan, rank)
    ranks = _meet(context, plan, rank, meeting, [end])
    model = families()[spec.family].load_stages().STAGE_MODELS[own_name(plan.name)](context)
    give_back()
    engine = worker_kind(plan.engine).build(plan, model, context, Host(ranks=ranks))
    assert isinstance(engine, RankedEngine)
    with torch.inference_mode():
        engine.warm_up()
        follow(engine, ranks, model.lora if isinstance(model, TakesLora) else None)
