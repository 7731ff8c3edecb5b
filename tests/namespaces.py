"""Hosts as network namespaces, joined by a bridge in a namespace of its own. Each process gets its own /tmp and
/dev/shm, so that nothing can pass but through the network. Needs root and iproute2."""

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

import pytest

SOURCE = Path(__file__).parents[1] / "src"
ENABLE = "needs network namespaces: run as root, with `apt-get install iproute2`, in a container with --privileged"
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def need_namespaces() -> None:
    """Skip where namespaces cannot be made; where CI runs they must."""
    if shutil.which("ip") and os.geteuid() == 0:
        name = f"sgtry{os.getpid()}"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        if made.returncode == 0:
            subprocess.run(["ip", "netns", "del", name], check=True)
            return
    if os.environ.get("SEGUE_CI"):
        pytest.fail(ENABLE)
    pytest.skip(ENABLE)


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
        paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"}
        command = self.command([sys.executable, *words], mounts or {})
        if log is None:
            return subprocess.Popen(command, env={**environment, **variables}, stdout=subprocess.PIPE, text=True)
        with log.open("a") as out:
            return subprocess.Popen(
                command, env={**environment, **variables}, stdout=out, stderr=subprocess.STDOUT, text=True
            )

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def mend(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "up")


@contextmanager
def parted(*hosts: Host) -> Iterator[None]:
    """Let these hosts reach all others, but not each other: the bridge drops their frames."""
    for host in hosts:
        _ip("-n", host.switch, "link", "set", host.port, "type", "bridge_slave", "isolated", "on")
    try:
        yield
    finally:
        for host in hosts:
            _ip("-n", host.switch, "link", "set", host.port, "type", "bridge_slave", "isolated", "off")


@contextmanager
def slow(host: Host, seconds: float, loss: float) -> Iterator[None]:
    """Put a cable between a host and the bridge that takes `seconds` each way, and loses this part of the frames."""
    if not os.path.exists("/dev/net/tun"):
        pytest.skip(
            "needs TAP devices: /dev/net/tun is missing; `modprobe tun`, in a container with --device /dev/net/tun"
        )
    words = [sys.executable, str(Path(__file__).with_name("slow_cable.py")), "near", "far", str(seconds), str(loss)]
    command = ["ip", "netns", "exec", host.switch, *words]
    cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert cable.stdout is not None
        assert cable.stdout.readline() == "ready\n"
        _ip("-n", host.switch, "link", "add", "between", "type", "bridge")
        _ip("-n", host.switch, "link", "set", "between", "up")
        _ip("-n", host.switch, "link", "set", "near", "master", "between", "up")
        _ip("-n", host.switch, "link", "set", "far", "master", "bridge", "up")
        _ip("-n", host.switch, "link", "set", host.port, "master", "between")
        yield
    finally:
        _ip("-n", host.switch, "link", "set", host.port, "master", "bridge")
        _ip("-n", host.switch, "link", "del", "between")
        cable.communicate()


@contextmanager
def narrow(host: Host, rate: str) -> Iterator[None]:
    """Bound the bandwidth in both directions, e.g. to "10mbit"."""
    if shutil.which("tc") is None:
        pytest.skip("needs tc: `apt-get install iproute2`")
    words = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
    ends = [(host.name, host.device), (host.switch, host.port)]
    for space, device in ends:
        _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, *words)
    try:
        yield
    finally:
        for space, device in ends:
            _run("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make so many hosts, 10.77.0.1 and so on, and remove them."""
    need_namespaces()
    base = f"sg{os.getpid()}x{next(_numbers)}"
    switch = f"{base}s"
    made = [Host(f"{base}h{n}", f"10.77.0.{n}", "cable", f"port{n}", switch) for n in range(1, count + 1)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in made:
            _ip("netns", "add", host.name)
            _ip("-n", switch, "link", "add", host.port, "type", "veth", "peer", "name", "cable", "netns", host.name)
            _ip("-n", switch, "link", "set", host.port, "master", "bridge", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "cable")
            _ip("-n", host.name, "link", "set", "cable", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
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


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
