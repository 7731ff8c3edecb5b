"""The fork server: one process that imports torch and transformers once, then forks every worker from itself.

Importing them costs seconds of CPU per process; a forked worker starts in milliseconds, shares the pages, and is
quickly replaced when killed. The server talks over a SOCK_SEQPACKET pair inherited from the orchestrator and is
single-threaded, so that forking is safe; it never touches a device.

No process is left behind: workers get SIGKILL from the kernel when this process dies (PR_SET_PDEATHSIG), and this
process ends, killing them and removing the runtime directory, when the orchestrator's end of the pair closes. SIGINT
and SIGTERM are for the orchestrator, which drains; this process and the workers ignore them, since a terminal or a
service manager sends them to the whole group.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import selectors
import shutil
import signal
import socket
from collections.abc import Callable, Mapping

from segue.messages.process import (
    MESSAGE_BYTES,
    Exited,
    Kill,
    Preloaded,
    PreloadFailed,
    Spawn,
    Spawned,
    WorkerSpec,
    encode,
    to_fork_server,
)
from segue.worker.process.processes import adopt_orphans, end_children, live, name_process
from segue.worker.process.weights_store import WeightsStore

log = logging.getLogger(__name__)


def serve(
    control: socket.socket,
    runtime_dir: str,
    preload: list[str],
    configure: Callable[[], None],
    run: Callable[[WorkerSpec, Mapping[str, WeightsStore]], None],
    no_kernels: Callable[[], str],
) -> None:
    """Answer `Spawn` and report `Exited` until the orchestrator's end closes.

    `preload`: modules imported before the first fork. `configure`: sets up the logs; called after each import, since
    libraries give themselves log handlers when they are imported. `run`: runs a worker, called in the child, with the
    stores of the weights that it shares, by stage.
    `no_kernels`: returns why there are no compiled kernels, or nothing; called here, once for all workers.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name_process("segue-forks")
    adopt_orphans()  # the followers of a worker that was killed (`segue.worker.process.ranks`)
    try:
        gc.disable()  # imports leave no garbage, but make the collector walk all modules repeatedly (0.5 s)
        try:
            for module in preload:
                importlib.import_module(module)
                configure()
        except Exception as error:
            # any exception of the family's import is the error of the start: report it completely
            log.error("a module that the stages need cannot be imported", exc_info=error)
            control.send(encode(PreloadFailed(message=f"{type(error).__name__}: {error}")))
            return
        gc.freeze()  # collections then leave these objects alone, so that their pages stay shared with workers
        gc.enable()
        control.send(encode(Preloaded(no_kernels=no_kernels())))
        _Server(control, run).loop()
    except (BrokenPipeError, ConnectionResetError):
        return  # the orchestrator is gone
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)


class _Server:
    def __init__(self, control: socket.socket, run: Callable[[WorkerSpec, Mapping[str, WeightsStore]], None]) -> None:
        self.control = control
        self.run = run
        self.children: dict[int, WorkerSpec] = {}
        self.weights: dict[tuple[str, str], WeightsStore] = {}
        """(stage, device) → what its workers share their weights by (`segue.worker.process.shared_weights`), as long as
        one of them lives."""

    def loop(self) -> None:
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # needed only so that the signal writes to the wake-up pair
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.control, selectors.EVENT_READ)
                selector.register(wake_read, selectors.EVENT_READ)
                while True:
                    for key, _ in selector.select():
                        if key.fileobj is wake_read:
                            wake_read.recv(4096)
                            self.reap()
                        elif not self.answer():
                            return
        finally:
            for pid in self.children:
                os.kill(pid, signal.SIGKILL)
            for pid in self.children:
                os.waitpid(pid, 0)
            end_children()  # the children of dead workers are ours now

    def answer(self) -> bool:
        """Handle one message; False when the orchestrator is gone."""
        try:
            data = self.control.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            return False
        if not data:
            return False
        message = to_fork_server.decode(data)
        if isinstance(message, Spawn):
            spec, parent = message.spec, os.getpid()
            for place in spec.shared.items():
                if place not in self.weights:
                    self.weights[place] = WeightsStore()
            if (pid := os.fork()) == 0:
                live(parent, f"segue-{spec.worker}", lambda: self.worker(spec))
            self.children[pid] = spec
            self.control.send(encode(Spawned(worker=spec.worker, pid=pid)))
        elif isinstance(message, Kill) and message.pid in self.children:
            os.kill(message.pid, signal.SIGKILL)
        return True

    def reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if spec := self.children.pop(pid, None):
                self.close_weights()
                self.control.send(encode(Exited(worker=spec.worker, pid=pid, how=_describe(status))))

    def close_weights(self) -> None:
        """Give up what no worker shares any more: a worker that comes again then needs the memory of one copy only."""
        used = {place for spec in self.children.values() for place in spec.shared.items()}
        for place in self.weights.keys() - used:
            self.weights.pop(place).close()

    def worker(self, spec: WorkerSpec) -> None:
        """Run a worker, in the child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.control.close()
        for place in self.weights.keys() - spec.shared.items():
            self.weights.pop(place).close()
        self.run(spec, {stage: store for (stage, _), store in self.weights.items()})


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit {code}"
    return f"signal {-code} ({signal.Signals(-code).name})"
