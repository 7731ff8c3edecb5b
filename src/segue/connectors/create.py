"""Create a connector of a given kind from a deployment's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from segue.connectors.base import Connector
from segue.connectors.device.memory import DeviceMemory
from segue.connectors.inproc import InProcessConnector
from segue.connectors.mooncake.engine import MooncakeEngineConnector
from segue.connectors.mooncake.store import MooncakeStoreConnector
from segue.connectors.nixl import NixlConnector
from segue.connectors.shm.connector import SharedMemoryConnector
from segue.connectors.tcp.connector import TcpConnector
from segue.messages.errors import ConfigError, nearest

LOOPBACK = "127.0.0.1"

KEYS: dict[str, tuple[str, ...]] = {
    "inproc": ("max_bytes",),
    "shm": ("shm_threshold_bytes", "pool_bytes", "max_bytes", "cuda_pool_bytes"),
    "tcp": ("inline_threshold_bytes", "max_bytes"),
    "mooncake_engine": ("inline_threshold_bytes", "max_bytes", "host", "protocol", "device_name"),
    "nixl": ("inline_threshold_bytes", "max_bytes", "device_name"),
    "mooncake_store": (
        *("inline_threshold_bytes", "max_bytes", "segment", "localbuf"),
        *("host", "master", "metadata_server", "proto", "rdma"),
    ),
}
"""Kind → the settings that it has."""
_TEXTS = frozenset({"host", "protocol", "device_name", "master", "metadata_server", "proto", "rdma"})
"""Keys whose values are no sizes."""


@dataclass(frozen=True, slots=True)
class Network:
    """What a connector between hosts needs to know."""

    host: str
    """Address of the interface that others reach this worker by."""
    key: bytes
    """The secret of the system."""
    as_bfloat16: frozenset[tuple[str, str]] = frozenset()
    """Edges whose float32 tensors travel as bfloat16."""


def create(
    kind: str,
    address: str,
    extra: dict[str, Any],
    device: DeviceMemory | None = None,
    network: Network | None = None,
    *,
    receives: bool = True,
) -> Connector:
    """Create the connector `kind` (a key of `KEYS`) with the deployment's `extra` settings; sizes are in bytes.

    `address` names this worker's pool to others on the machine. `device` is the accelerator whose tensors need not pass
    through the host in `shm`, and for which `tcp` locks the pages of what it receives. `tcp` needs `network`.
    `receives`: some edge with this connector leads to this worker. Raises `ConfigError` naming an unknown kind or key,
    with its nearest neighbour, or an invalid value.
    """
    if kind not in KEYS:
        raise ConfigError(f"there is no connector {kind!r}{nearest(kind, KEYS)}", field="name")
    for key, value in extra.items():
        if key not in KEYS[kind]:
            raise ConfigError(f"the connector {kind!r} has no key {key!r}{nearest(key, KEYS[kind])}", field=key)
        if key in _TEXTS:
            if not isinstance(value, str):
                raise ConfigError(f"{key} is {value!r}; it must be text", field=key)
        elif type(value) is not int:
            raise ConfigError(f"{key} is {value!r}; it must be a whole number of bytes", field=key)
    if kind == "inproc":
        return InProcessConnector(**extra)
    if kind == "tcp":
        if network is None:
            raise ConfigError("the connector 'tcp' needs a network: start with `segue serve --listen`", field="name")
        return TcpConnector(
            network.host, network.key, **extra, as_bfloat16=network.as_bfloat16, page_locked=device is not None
        )
    if kind == "nixl":
        return NixlConnector(**extra, as_bfloat16=network.as_bfloat16 if network is not None else frozenset())
    if kind.startswith("mooncake"):
        # on several hosts every worker has its own address, which the file cannot know
        host = network.host if network is not None else extra.get("host", LOOPBACK)
        extra = {**extra, "host": LOOPBACK if host == "auto" else host}
        as_bfloat16 = network.as_bfloat16 if network is not None else frozenset()
        if kind == "mooncake_engine":
            return MooncakeEngineConnector(**extra, as_bfloat16=as_bfloat16)
        return MooncakeStoreConnector(**extra, as_bfloat16=as_bfloat16, receives=receives)
    return SharedMemoryConnector(address, **extra, device=device)
