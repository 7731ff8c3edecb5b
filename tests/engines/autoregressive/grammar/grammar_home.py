"""A home of compilers: `python grammar_home.py FD [deadly]` keeps one at the other end of a socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from segue.engines.autoregressive.grammar.process import CompilerHome, Home, keep_home


class Homes:
    """Starts them. `deadly`: so many of the first are killed by each child that they fork for a grammar."""

    def __init__(self, deadly: int = 0) -> None:
        self._deadly = deadly
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> Home:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        if len(self.processes) < self._deadly:
            command.append("deadly")
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.processes.append(process)
        return Home(ours, process.wait)


@contextmanager
def home(deadly: int = 0, memory: int = 1 << 30) -> Iterator[tuple[CompilerHome, list[subprocess.Popen[bytes]]]]:
    """And its processes, the running one last. That one has ended when this does, and has been asked kindly."""
    homes = Homes(deadly)
    kept = CompilerHome(homes.start(), homes.start, memory)
    try:
        yield kept, homes.processes
    finally:
        kept.close()
        assert homes.processes[-1].wait(timeout=240) == 0


def children(process: subprocess.Popen[bytes]) -> list[int]:
    """Those that compile now."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _kill_home() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    keep_home(socket.socket(fileno=int(sys.argv[1])), _kill_home if "deadly" in sys.argv else lambda: None)
    os._exit(0)
