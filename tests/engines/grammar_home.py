"""A home of compilers: `python grammar_home.py FD` keeps one at the other end of a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from segue.engines.autoregressive.grammar_process import CompilerHome, keep_home


@contextmanager
def home() -> Iterator[tuple[CompilerHome, subprocess.Popen[bytes]]]:
    """And its process. It has ended when this does, and has been asked kindly."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    kept = CompilerHome(ours)
    try:
        yield kept, process
    finally:
        kept.close()
        assert process.wait(timeout=240) == 0


def children(process: subprocess.Popen[bytes]) -> list[int]:
    """Those that compile now."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


if __name__ == "__main__":
    keep_home(socket.socket(fileno=int(sys.argv[1])), lambda: None)
    os._exit(0)
