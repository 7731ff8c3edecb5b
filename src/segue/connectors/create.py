"""Create a connector of a given kind from a deployment's settings."""

from __future__ import annotations

from typing import Any

from segue.connectors.base import Connector
from segue.connectors.device import DeviceMemory
from segue.connectors.inproc import InProcessConnector
from segue.connectors.shm import SharedMemoryConnector
from segue.messages.errors import ConfigError, nearest

_KEYS: dict[str, tuple[str, ...]] = {
    "inproc": ("max_bytes",),
    "shm": ("shm_threshold_bytes", "pool_bytes", "max_bytes", "cuda_pool_bytes"),
}


def create(kind: str, address: str, extra: dict[str, Any], device: DeviceMemory | None = None) -> Connector:
    """Create the connector `kind` (`inproc` or `shm`) with the deployment's `extra` settings, all in bytes.

    `address` names this worker's pool to others on the machine, `device` is the accelerator whose tensors need not pass
    through the host; `inproc` ignores both. Raises `ConfigError` naming an unknown kind or key, with its nearest
    neighbour, or an invalid value.
    """
    if kind not in _KEYS:
        raise ConfigError(f"there is no connector {kind!r}{nearest(kind, _KEYS)}", field="name")
    for key, value in extra.items():
        if key not in _KEYS[kind]:
            raise ConfigError(f"the connector {kind!r} has no key {key!r}{nearest(key, _KEYS[kind])}", field=key)
        if type(value) is not int:
            raise ConfigError(f"{key} is {value!r}; it must be a whole number of bytes", field=key)
    if kind == "inproc":
        return InProcessConnector(**extra)
    return SharedMemoryConnector(address, **extra, device=device)
