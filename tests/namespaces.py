"""What tests do with the hosts of `segue.bench.harness.namespaces`: skip if there can be none, cut, part, slow down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from segue.bench.harness import namespaces
from segue.bench.harness.namespaces import Host, ip, run


def need_namespaces() -> None:
    """Skip where namespaces cannot be made; where CI runs they must."""
    if namespaces.possible():
        return
    if os.environ.get("SEGUE_CI"):
        pytest.fail(namespaces.ENABLE)
    pytest.skip(namespaces.ENABLE)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Make so many hosts, and remove them; skip where they cannot be made."""
    need_namespaces()
    with namespaces.hosts(count) as made:
        yield made


def cut(host: Host) -> None:
    """Pull the cable."""
    ip("-n", host.switch, "link", "set", host.port, "down")


def mend(host: Host) -> None:
    ip("-n", host.switch, "link", "set", host.port, "up")


def processes(host: Host) -> list[str]:
    """Return the name and the command line of each process of a host."""
    done = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    found = []
    for pid in done.stdout.split():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            found.append(f"{process.name()} {' '.join(process.cmdline())}")
    return found


def connected_ports(host: Host, other: Host, process: int) -> set[int]:
    """Return the ports of another host that a process of a host has connections to which it has made itself."""

    def addresses(*words: str) -> list[list[str]]:
        done = subprocess.run(
            ["ip", "netns", "exec", host.name, "ss", "-Htnp", *words], capture_output=True, text=True, check=True
        )
        return [line.split() for line in done.stdout.splitlines() if f"pid={process}," in line]

    listening = {words[2].rpartition(":")[2] for words in addresses("state", "listening")}
    made = (words[2:4] for words in addresses("state", "established"))
    ends = [[end.rpartition(":")[::2] for end in pair] for pair in made]
    return {int(there[1]) for here, there in ends if here[1] not in listening and there[0] == other.address}


@contextmanager
def parted(*hosts: Host) -> Iterator[None]:
    """Let these hosts reach all others, but not each other: the bridge drops their frames."""
    for host in hosts:
        ip("-n", host.switch, "link", "set", host.port, "type", "bridge_slave", "isolated", "on")
    try:
        yield
    finally:
        for host in hosts:
            ip("-n", host.switch, "link", "set", host.port, "type", "bridge_slave", "isolated", "off")


@contextmanager
def dropped(host: Host, other: Host, ports: set[int]) -> Iterator[None]:
    """Drop, in silence, what one host sends to these ports of another one."""
    rules = [["to", other.address, "ipproto", "tcp", "dport", str(port), "blackhole"] for port in ports]
    for rule in rules:
        ip("-n", host.name, "rule", "add", *rule)
    try:
        yield
    finally:
        for rule in rules:
            ip("-n", host.name, "rule", "del", *rule)


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
        ip("-n", host.switch, "link", "add", "between", "type", "bridge")
        ip("-n", host.switch, "link", "set", "between", "up")
        ip("-n", host.switch, "link", "set", "near", "master", "between", "up")
        ip("-n", host.switch, "link", "set", "far", "master", "bridge", "up")
        ip("-n", host.switch, "link", "set", host.port, "master", "between")
        yield
    finally:
        ip("-n", host.switch, "link", "set", host.port, "master", "bridge")
        ip("-n", host.switch, "link", "del", "between")
        cable.communicate()


@contextmanager
def narrow(host: Host, rate: str) -> Iterator[None]:
    """Bound the bandwidth in both directions, e.g. to "10mbit"."""
    if shutil.which("tc") is None:
        pytest.skip("needs tc: `apt-get install iproute2`")
    words = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
    ends = [(host.name, host.device), (host.switch, host.port)]
    for space, device in ends:
        run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, *words)
    try:
        yield
    finally:
        for space, device in ends:
            run("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root")
