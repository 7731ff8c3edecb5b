"""The TCP connector: `put` keeps a payload where it is, the consumer fetches it over a plain socket of its own.

Payloads below `inline_threshold_bytes` travel in the metadata. Others are sent straight from the producer's tensors
(those on a CUDA device are copied to the host in chunks, which are sent while the next ones are copied) and received
into memory that is used again: one copy on each side, the kernel's. Both sides prove that they know the key of the
system (`wire`).
"""

from __future__ import annotations

from segue.connectors.device.staging import page_locked_buffers
from segue.connectors.fetching import Buffers, Consumer
from segue.connectors.remote import MAX_BYTES, THRESHOLD_BYTES, RemoteConnector, check_sizes
from segue.connectors.tcp.consumer import TcpSource
from segue.connectors.tcp.producer import Producer
from segue.connectors.tcp.wire import Remote
from segue.messages.errors import ConfigError


class TcpConnector(RemoteConnector):
    """`Connector` over TCP, for processes on any hosts that reach each other.

    `host`: the address of the interface that others reach this worker by; it listens there, and nowhere else. `key`:
    the secret of the system, at least 32 bytes. `max_bytes` bounds the payloads that are put and not yet fetched, and
    the largest one. `as_bfloat16`: edges whose float32 tensors travel as bfloat16 (`narrow`). `page_locked`: a CUDA
    device reads what is received. Raises `ConfigError` for invalid values.

    A payload of a producer that dies is gone; one whose link is down for less than `wire.SILENCE_SECONDS` arrives.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        *,
        inline_threshold_bytes: int = THRESHOLD_BYTES,
        max_bytes: int = MAX_BYTES,
        as_bfloat16: frozenset[tuple[str, str]] = frozenset(),
        page_locked: bool = False,
    ) -> None:
        if len(key) < 32:
            raise ConfigError(f"the key has {len(key)} bytes; it must have at least 32", field="key")
        check_sizes(inline_threshold_bytes, max_bytes)
        buffers = page_locked_buffers() if page_locked else Buffers()
        super().__init__(
            "TCP",
            Remote,
            Producer(host, key, max_bytes),
            Consumer(lambda place: TcpSource(place, key), buffers),
            inline_threshold_bytes=inline_threshold_bytes,
            max_bytes=max_bytes,
            as_bfloat16=as_bfloat16,
        )
