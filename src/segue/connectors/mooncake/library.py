"""What both Mooncake connectors need: the package, its memory registration, a check of what it would not tell.

Mooncake asks nobody who connects for a secret, and its clients listen on every interface: the network must be trusted.
"""

from __future__ import annotations

import importlib
import mmap
from pathlib import Path
from typing import Any

from segue.connectors.slots import address_of
from segue.messages.errors import ConfigError

PROTOCOLS = ("tcp", "rdma")
_RDMA = Path("/sys/class/infiniband")


def load(module: str) -> Any:
    """Import a module of Mooncake. Raises `ConfigError` with the command that installs what is missing."""
    try:
        return importlib.import_module(f"mooncake.{module}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "Mooncake is not installed: pip install 'segue[mooncake]', or mooncake-transfer-engine for CUDA",
            field="name",
        ) from error
    except ImportError as error:  # a shared library of the system
        raise ConfigError(
            f"Mooncake cannot be loaded: {error}. On Debian: apt-get install libibverbs1 libnuma1 libcurl4",
            field="name",
        ) from error


def check_protocol(protocol: str, field: str) -> None:
    """Raise `ConfigError` for a protocol that Mooncake cannot use here; it would say so by falling back, or not at
    all."""
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{field} is {protocol!r}; it must be one of {', '.join(PROTOCOLS)}", field=field)
    if protocol == "rdma" and not (_RDMA.is_dir() and any(_RDMA.iterdir())):
        raise ConfigError(
            f"{field} is 'rdma', but this machine has no RDMA device ({_RDMA} is empty); write tcp", field=field
        )


class Memory:
    """A client of Mooncake with the buffers that it may read and write: they live until they are forgotten."""

    def __init__(self, client: Any, register: str, forget: str) -> None:
        """`register` and `forget` name the client's methods."""
        self.client = client
        self._register = register
        self._forget = forget
        self._buffers: dict[int, mmap.mmap] = {}

    def add(self, buffer: mmap.mmap) -> None:
        """Raises `OSError`."""
        at = address_of(buffer)
        if (code := getattr(self.client, self._register)(at, len(buffer))) != 0:
            raise OSError(f"Mooncake cannot register {len(buffer)} bytes of memory: it returned {code}")
        self._buffers[at] = buffer

    def drop(self, buffer: mmap.mmap) -> None:
        at = address_of(buffer)
        getattr(self.client, self._forget)(at)
        del self._buffers[at]

    def close(self, idle: bool) -> None:
        """End the client; if a thread is in one of its calls (not `idle`), it ends, with the memory, after that."""
        self.client = None
        if idle:
            self._buffers.clear()
