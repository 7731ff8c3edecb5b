"""The fork server: one process that imports torch and transformers once, then forks every worker from itself.

Importing them costs seconds of CPU per process; forked, a worker starts in milliseconds, shares the pages, and a killed
one is back at once. It talks over a SOCK_SEQPACKET pair inherited from the orchestrator and is single-threaded, so that
forking is safe; it never touches a device.

Nobody is left behind: workers get SIGKILL from the kernel when this process dies (PR_SET_PDEATHSIG), and this process
ends, killing them and removing the runtime directory, when the orchestrator's end of the pair closes. SIGINT and
SIGTERM are for the orchestrator, which drains; here and in the workers they are ignored, since a terminal or a service
manager sends them to the whole group.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import traceback
from collections.abc import Callable

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
from segue.worker.processes import adopt_orphans, end_children, live, name_process


def serve(control: socket.socket, runtime_dir: str, preload: list[str], run: Callable[[WorkerSpec], None]) -> None:
    """Answer `Spawn` and report `Exited` until the orchestrator's end closes.

    `preload`: modules imported before the first fork. `run`: a worker's whole life, called in the child.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name_process("segue-forks")
    adopt_orphans()  # the followers of a worker that was killed (`segue.worker.ranks`)
    try:
        gc.disable()  # imports leave no garbage, but have the collector walk all modules again and again (0.5 s)
        try:
            for module in preload:
                importlib.import_module(module)
        except Exception as error:
            # whatever the family's import raises is the start's own error: hand it over whole
            traceback.print_exc()
            control.send(encode(PreloadFailed(message=f"{type(error).__name__}: {error}")))
            return
        gc.freeze()  # no collection touches what workers share with this process, so its pages stay shared
        gc.enable()
        control.send(encode(Preloaded()))
        _Server(control, run).loop()
    except (BrokenPipeError, ConnectionResetError):
        return  # the orchestrator is gone
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)


class _Server:
    def __init__(self, control: socket.socket, run: Callable[[WorkerSpec], None]) -> None:
        self.control = control
        self.run = run
        self.children: dict[int, str] = {}

    def loop(self) -> None:
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # its only job is to write to the wake-up pair
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
            end_children()  # what they had started is ours now

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
            if (pid := os.fork()) == 0:
                live(parent, f"segue-{spec.worker}", lambda: self.worker(spec))
            self.children[pid] = spec.worker
            self.control.send(encode(Spawned(worker=spec.worker, pid=pid)))
        elif isinstance(message, Kill) and message.pid in self.children:
            os.kill(message.pid, signal.SIGKILL)
        return True

    def reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if worker := self.children.pop(pid, None):
                self.control.send(encode(Exited(worker=worker, pid=pid, how=_describe(status))))

    def worker(self, spec: WorkerSpec) -> None:
        """A worker's life, in the child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.control.close()
        self.run(spec)


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit {code}"
    return f"signal {-code} ({signal.Signals(-code).name})"
