"""The connector over Mooncake's transfer engine: `put` writes a payload into registered memory, the consumer reads it
from there (`slots`)."""

from __future__ import annotations

from functools import partial
from typing import Any

from segue.connectors.fetching import Buffers, Consumer, SourceLost
from segue.connectors.mooncake.library import Memory, check_protocol, load
from segue.connectors.remote import MAX_BYTES, THRESHOLD_BYTES, RemoteConnector, check_sizes
from segue.connectors.slots import SlotPlace, Slots, SlotSource
from segue.messages.errors import ConfigError


class InMemory(SlotPlace, frozen=True, tag_field="kind", tag="mooncake_engine"):
    """Where a payload is to be read."""

    session: str
    """`HOST:PORT` of the producer's engine."""


class MooncakeEngineConnector(RemoteConnector):
    """`Connector` over Mooncake's transfer engine.

    `host`: the address that others reach this machine by. `protocol`: `tcp` or `rdma`, the latter on the devices
    `device_name` (separated by commas; empty: those that Mooncake chooses). `max_bytes`: memory that is registered, and
    bounds the payloads that are put and not yet fetched. Raises `ConfigError` for invalid values, and where Mooncake is
    not installed.

    A payload of a producer that dies is gone; Mooncake waits 30 s for one that is cut off.
    """

    def __init__(
        self,
        host: str,
        *,
        protocol: str = "tcp",
        device_name: str = "",
        inline_threshold_bytes: int = THRESHOLD_BYTES,
        max_bytes: int = MAX_BYTES,
        as_bfloat16: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        check_sizes(inline_threshold_bytes, max_bytes)
        check_protocol(protocol, "protocol")
        engine = load("engine").TransferEngine()
        if (code := engine.initialize(host, "P2PHANDSHAKE", protocol, device_name)) != 0:
            raise ConfigError(
                f"Mooncake's transfer engine does not start on {host!r} with {protocol}: it returned {code}",
                field="protocol",
            )
        memory = Memory(engine, "register_memory", "unregister_memory")
        super().__init__(
            "Mooncake",
            InMemory,
            Slots(memory, partial(InMemory, session=f"{host}:{engine.get_rpc_port()}"), max_bytes),
            Consumer(lambda place: SlotSource(Peer(place.session, memory)), Buffers(memory.add, memory.drop)),
            inline_threshold_bytes=inline_threshold_bytes,
            max_bytes=max_bytes,
            as_bfloat16=as_bfloat16,
            closed=memory.close,
        )


class Peer:
    """The `Reader` of one producer's memory."""

    def __init__(self, session: str, memory: Memory) -> None:
        self.name = session
        self._memory = memory

    def read(self, to: int, at: int, size: int) -> None:
        if (code := self._client().transfer_sync_read(self.name, to, at, size)) != 0:
            raise SourceLost(f"Mooncake read nothing: it returned {code}")

    def write(self, at: int, to: int, size: int) -> None:
        if (code := self._client().transfer_sync_write(self.name, at, to, size)) != 0:
            raise SourceLost(f"Mooncake wrote nothing: it returned {code}")

    def close(self) -> None:
        """Mooncake keeps no connection that would have to be closed."""

    def _client(self) -> Any:
        if (client := self._memory.client) is None:
            raise SourceLost("the connector is closed")
        return client
