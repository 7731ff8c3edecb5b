"""The two hosts of a run: network namespaces where they can be made, else this machine's loopback interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from segue.bench.harness import namespaces
from segue.bench.harness.namespaces import Host, Loopback


@dataclass(frozen=True)
class Network:
    """Two hosts. This process is on the near one."""

    said: str
    """What they are, for the report."""
    near: Host | Loopback
    far: Host | Loopback

    @property
    def apart(self) -> bool:
        """Whether nobody else is on their network."""
        return isinstance(self.near, Host)


@contextmanager
def two_hosts() -> Iterator[Network]:
    """Make two hosts; within it, the network of this thread, and of those it starts, is the near one's."""
    if not namespaces.possible():
        yield Network("loopback: this machine makes no network namespaces", Loopback(), Loopback())
        return
    with namespaces.hosts(2) as (near, far), namespaces.inside(near):
        yield Network("two network namespaces, joined by veth pairs and a bridge", near, far)
