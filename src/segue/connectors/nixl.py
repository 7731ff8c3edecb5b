"""The connector over NIXL (`pip install nixl`), whose UCX backend picks the fastest way between two processes that it
finds: shared memory, RDMA or TCP. `put` writes a payload into registered memory, the consumer reads it from there
(`slots`).

Optional reading: a connector between hosts.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from segue.connectors.fetching import Buffers, Consumer, SourceLost
from segue.connectors.remote import MAX_BYTES, THRESHOLD_BYTES, RemoteConnector, check_sizes
from segue.connectors.slots import SlotPlace, Slots, SlotSource, address_of
from segue.messages.errors import ConfigError

log = logging.getLogger(__name__)

_BACKEND = "UCX"
_HOST_MEMORY = "DRAM"
_DEVICES = (Path("/sys/class/net"), Path("/sys/class/infiniband"))
_PATIENCE = 30.0
"""Seconds after which a transfer of a producer that is cut off is given up."""
_AT_ONCE, _NAP = 200, 1e-4
"""How often the state of a transfer is looked at before the thread sleeps, and for how many seconds: NIXL has no call
that waits."""


class OverNixl(SlotPlace, frozen=True, tag_field="kind", tag="nixl"):
    """Where a payload is to be read."""

    agent: bytes
    """What the producer's agent says of itself and its memory, some hundred bytes."""


class NixlConnector(RemoteConnector):
    """`Connector` over NIXL.

    `device_name`: the network devices that UCX may use, separated by commas; empty: all. `max_bytes`: memory that is
    registered, and bounds the payloads that are put and not yet fetched. Raises `ConfigError` for invalid values, and
    where NIXL is not installed or does not start.

    NIXL asks nobody who connects for a secret: the network must be trusted. A payload of a producer that dies is gone.
    """

    def __init__(
        self,
        *,
        device_name: str = "",
        inline_threshold_bytes: int = THRESHOLD_BYTES,
        max_bytes: int = MAX_BYTES,
        as_bfloat16: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        check_sizes(inline_threshold_bytes, max_bytes)
        agent = Agent(device_name)
        slots = Slots(agent, lambda at, pool, number, size: OverNixl(at, pool, number, size, metadata), max_bytes)
        metadata = agent.metadata()  # the slots' memory is in it
        super().__init__(
            "NIXL",
            OverNixl,
            slots,
            Consumer(lambda place: SlotSource(Peer(place, agent)), Buffers(agent.add, agent.drop)),
            inline_threshold_bytes=inline_threshold_bytes,
            max_bytes=max_bytes,
            as_bfloat16=as_bfloat16,
            closed=agent.close,
        )


class Agent:
    """NIXL's agent of this process, with the memory that others may read and write. Thread-safe."""

    def __init__(self, device_name: str) -> None:
        """Raises `ConfigError`."""
        self._library = load()
        check_devices(device_name)
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of every agent
        config = self._library.nixl_agent_config(
            backends=[], sync_mode=self._library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            client = self._library.nixl_agent(f"segue-{os.getpid()}-{os.urandom(8).hex()}", config)
            client.create_backend(_BACKEND, {"ucx_devices": device_name} if device_name else {})
        except Exception as error:  # of NIXL's own kinds, which have no common one
            raise ConfigError(
                f"NIXL does not start with device_name {device_name!r}: {error}", field="device_name"
            ) from error
        self.client: Any = client
        self._registered: dict[int, tuple[mmap.mmap, Any]] = {}

    def add(self, buffer: mmap.mmap) -> None:
        """Raises `OSError`."""
        at = address_of(buffer)
        try:
            described = self.client.get_reg_descs([(at, len(buffer), 0, "")], _HOST_MEMORY)
            self._registered[at] = buffer, self.client.register_memory(described, backends=[_BACKEND])
        except Exception as error:
            raise OSError(f"NIXL cannot register {len(buffer)} bytes of memory: {error}") from error

    def drop(self, buffer: mmap.mmap) -> None:
        at = address_of(buffer)
        try:
            self.client.deregister_memory(self._registered[at][1])
        except Exception:  # the memory stays: others might still write to it
            log.exception("NIXL does not let go of %d bytes of memory", len(buffer))
            return
        del self._registered[at]

    def metadata(self) -> bytes:
        """Return what another agent needs to read the memory that is registered now."""
        said: bytes = self.client.get_agent_metadata()
        return said

    def move(self, way: str, peer: str, here: int, there: int, size: int) -> None:
        """Read from a peer's memory, or write to it (`way`: READ or WRITE), and wait for the end. Raises
        `SourceLost`."""
        client = self.client
        if client is None:
            raise SourceLost("the connector is closed")
        try:
            ends = [client.get_xfer_descs([(at, size, 0)], _HOST_MEMORY) for at in (here, there)]
            transfer = client.initialize_xfer(way, *ends, peer, backends=[_BACKEND])
            try:
                state = client.transfer(transfer)
                looks, until = 0, time.monotonic() + _PATIENCE
                while state == "PROC" and time.monotonic() < until:
                    looks += 1
                    time.sleep(0 if looks < _AT_ONCE else _NAP)
                    state = client.check_xfer_state(transfer)
            finally:
                client.release_xfer_handle(transfer)
        except Exception as error:
            raise SourceLost(f"NIXL moved nothing: {type(error).__name__}: {error}") from error
        if state != "DONE":
            raise SourceLost(f"NIXL moved nothing: the transfer's state is {state}, {_PATIENCE:g} s at most were given")

    def close(self, idle: bool) -> None:
        """End the agent; if a thread is in one of its calls (not `idle`), it ends, with the memory, after that."""
        self.client = None
        if idle:
            self._registered.clear()


class Peer:
    """The `Reader` of one producer's memory."""

    def __init__(self, place: OverNixl, agent: Agent) -> None:
        self.name = f"producer {place.pool.hex()}"
        self._metadata = place.agent
        self._agent = agent
        self._peer: str | None = None

    def read(self, to: int, at: int, size: int) -> None:
        self._agent.move("READ", self._known(), to, at, size)

    def write(self, at: int, to: int, size: int) -> None:
        self._agent.move("WRITE", self._known(), at, to, size)

    def close(self) -> None:
        client = self._agent.client
        if self._peer is not None and client is not None:
            with suppress(Exception):  # it is forgotten already if it was lost
                client.remove_remote_agent(self._peer)

    def _known(self) -> str:
        """Return NIXL's name of the producer."""
        if self._peer is None:
            client = self._agent.client
            if client is None:
                raise SourceLost("the connector is closed")
            try:
                said = client.add_remote_agent(self._metadata)
            except Exception as error:
                raise SourceLost(f"NIXL does not know the producer: {type(error).__name__}: {error}") from error
            self._peer = said.decode() if isinstance(said, bytes) else said
        return self._peer


def check_devices(device_name: str) -> None:
    """Raise `ConfigError` for a network device that this machine does not have; UCX would do without it."""
    known = sorted(path.name for kind in _DEVICES if kind.is_dir() for path in kind.iterdir())
    for name in filter(None, device_name.split(",")):
        if name.partition(":")[0] not in known:  # of RDMA devices, with the port: mlx5_0:1
            raise ConfigError(
                f"device_name has {name!r}, but this machine's network devices are {', '.join(known)}",
                field="device_name",
            )


def load() -> Any:
    """Import NIXL. Raises `ConfigError` with the command that installs it."""
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"NIXL is not installed, or cannot be loaded ({error}): pip install nixl", field="name"
        ) from error
