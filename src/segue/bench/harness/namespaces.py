"""Hosts as network namespaces, joined by a bridge in a namespace of its own. Each process gets its own /tmp and
/dev/shm, so that nothing can pass but through the network. Needs root and iproute2; `Loopback` is every host where they
cannot be made."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from segue.bench.harness.process import python_path

ENABLE = "needs network namespaces: run as root, with `apt-get install iproute2`, in a container with --privileged"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def possible() -> bool:
    """Whether this process can make namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"sgtry{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


@dataclass(frozen=True)
class Host:
    """One namespace. `device`: its end of the cable."""

    name: str
    address: str
    device: str
    port: str
    """The bridge's end."""
    switch: str

    def command(self, words: list[str], mounts: Mapping[Path, str]) -> list[str]:
        """Return a command that runs `words` here. `mounts`: directory → where this host has it."""
        script = "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt"
        for number, path in enumerate(mounts):
            script += f" && mkdir /mnt/{number} && mount --bind {path} /mnt/{number}"
        script += " && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm"
        for number, place in enumerate(mounts.values()):
            script += f" && mkdir -p {place} && mount --bind /mnt/{number} {place}"
        script += ' && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", script, "sh", *words]

    def start(
        self, *words: str, mounts: Mapping[Path, str] | None = None, log: Path | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        """Start `python WORDS` here, with its output in `log`, or in a pipe."""
        return _start(self.command([sys.executable, *words], mounts or {}), log, {"TMPDIR": "/tmp", **variables})


@dataclass(frozen=True)
class Loopback:
    """This machine, in place of each of several hosts."""

    address: str = "127.0.0.1"

    def start(
        self, *words: str, mounts: Mapping[Path, str] | None = None, log: Path | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        """As `Host.start`; directories are where they are."""
        return _start([sys.executable, *words], log, variables)


def _start(command: list[str], log: Path | None, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **variables}
    if log is None:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    with log.open("a") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make so many hosts, 10.77.0.1 and so on, and remove them. Raises `OSError` where that is not possible."""
    base = f"sg{os.getpid()}x{next(_numbers)}"
    switch = f"{base}s"
    made = [Host(f"{base}h{n}", f"10.77.0.{n}", "cable", f"port{n}", switch) for n in range(1, count + 1)]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host in made:
            ip("netns", "add", host.name)
            ip("-n", switch, "link", "add", host.port, "type", "veth", "peer", "name", "cable", "netns", host.name)
            ip("-n", switch, "link", "set", host.port, "master", "bridge", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable")
            ip("-n", host.name, "link", "set", "cable", "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in [switch, *(host.name for host in made)]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def inside(host: Host) -> Iterator[None]:
    """Let the network of this thread, and of those it starts meanwhile, be that of a host."""
    with Path("/proc/thread-self/ns/net").open() as here:
        with Path("/var/run/netns", host.name).open() as there:
            _enter(there.fileno())
        try:
            yield
        finally:
            _enter(here.fileno())


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def ip(*words: str) -> None:
    """Run `ip WORDS`. Raises `OSError` with what it says."""
    run("ip", *words)


def run(*words: str) -> None:
    """Run a command. Raises `OSError` with what it says."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
