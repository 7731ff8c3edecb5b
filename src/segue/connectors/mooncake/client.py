"""This worker's part in a Mooncake store: it never waits long, whatever the master or a receiver's host is doing.

Mooncake's calls wait for half a minute for a host that is cut off, and for seconds for a master that is dead. So a
thread makes those of the producer. While one of them takes too long, and after one that has failed until the master
answers again, `put` says that there is no space. The keys that could not be removed then are removed later.
"""

from __future__ import annotations

import logging
import mmap
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from segue.connectors.fetching import Buffers
from segue.connectors.mooncake.library import Memory, load
from segue.connectors.payload import Encoded
from segue.connectors.slots import address_of
from segue.messages.errors import ConfigError

log = logging.getLogger(__name__)

NO_SPACE = -200
NOT_FOUND = -704
_CONNECT_SECONDS = 5.0
_PATIENCE = 2.0
"""Seconds that a producer waits for the store, and one for every MiB of a payload."""
_PROBE_SECONDS = 1.0
"""Between the attempts to reach a store that has failed."""


def join(
    host: str, metadata_server: str, master: str, segment: int, localbuf: int, protocol: str, devices: str
) -> Client:
    """Become a client of the store at `master`. `segment`: bytes that this process lends to it, 0 if it receives
    nothing. Raises `ConfigError` if the store cannot be reached."""
    _check_master(master)
    module = load("store")
    store = module.MooncakeDistributedStore()
    code = store.setup(host, metadata_server, segment, localbuf, protocol, devices, master)
    if code != 0:
        raise ConfigError(
            f"the Mooncake store of {master} takes no {host!r} in, over {protocol} and with the metadata server "
            f"{metadata_server!r}: it returned {code}",
            field="master",
        )
    pinned = module.ReplicateConfig()
    pinned.with_hard_pin = True  # else the store forgets payloads when memory is short, and says nothing
    return Client(store, pinned)


class Client:
    """A client of a store. Thread-safe."""

    def __init__(self, store: Any, pinned: Any) -> None:
        """`store`: a `MooncakeDistributedStore` that is set up. `pinned`: how it is to keep payloads."""
        self._store = store
        self._pinned = pinned
        self._memory = memory = Memory(self._store, "register_buffer", "unregister_buffer")
        self.buffers = Buffers(memory.add, memory.drop)
        self._lock = threading.Lock()
        self._leftover: list[str] = []
        self._failed = False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="segue-mooncake", daemon=True)
        self._thread.start()

    def put(self, key: str, encoded: Encoded) -> bool:
        """Store a payload under a key that nobody has used. False: there is no space, or the store does not answer."""
        if self._failed:
            return False
        buffer = self.buffers.take(encoded.size)
        with self.buffers.filling(buffer):
            encoded.write_into(memoryview(buffer)[: encoded.size])
        code = self._call(
            lambda: self._put(key, buffer, encoded.size), None, patience=_PATIENCE + encoded.size / (1 << 20)
        )
        if code not in (0, NO_SPACE):
            self.remove([key])  # it may yet arrive
        return bool(code == 0)

    def take(self, key: str, buffer: mmap.mmap, size: int) -> int:
        """Read a payload into a buffer of `buffers` and remove it, however long it takes; return its bytes, or a code
        below 0."""
        got = int(self._store.get_into(key, address_of(buffer), size))
        if got == size and (code := self._store.remove(key, True)) not in (0, NOT_FOUND):
            self._fail(f"it returned {code} for a removal")
            with self._lock:
                self._leftover.append(key)
        return got

    def remove(self, keys: Sequence[str]) -> None:
        """Remove what there is of these keys, now or when the store answers again."""
        left = list(keys)
        if not self._failed and all(code in (0, NOT_FOUND) for code in self._call(lambda: self._remove(left), [-1])):
            return
        with self._lock:
            self._leftover += left

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return those of the keys that the store does not have; none if it does not answer."""
        found = [] if self._failed else self._call(lambda: self._store.batch_is_exist(list(keys)), [])
        return [key for key, there in zip(keys, found, strict=False) if there == 0]

    def close(self, idle: bool) -> None:
        """Leave the store. `idle`: no thread is reading from it; else it is left when the process ends."""
        self._closing.set()
        self._calls.put(None)
        self._thread.join(_PATIENCE)
        if idle and not self._thread.is_alive():
            self._store.close()
            self._memory.close(idle)

    def _put(self, key: str, buffer: mmap.mmap, size: int) -> int:
        code = int(self._store.put_from(key, address_of(buffer), size, self._pinned))
        if code in (0, NO_SPACE):
            self.buffers.give(buffer)
        else:
            self.buffers.set_aside(buffer)
            self._fail(f"it returned {code} for a payload of {size} bytes")
        return code

    def _remove(self, keys: list[str]) -> list[int]:
        codes = list(self._store.batch_remove(keys, True))  # by force: a client that looked for a key has a lease on it
        if not all(code in (0, NOT_FOUND) for code in codes):
            self._fail(f"it returned {codes} for a removal")
        return codes

    def _fail(self, why: str) -> None:
        self._failed = True
        log.warning("the Mooncake store fails: %s. Payloads go with the messages until it answers", why)

    def _call(self, call: Callable[[], Any], otherwise: Any, *, patience: float = _PATIENCE) -> Any:
        """Return what a call in the thread returns; `otherwise` if that takes too long, for then the store has failed
        until the call ends."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        try:
            return future.result(patience)
        except TimeoutError:
            self._fail(f"it has not answered for {patience:.0f} s")
            return otherwise

    def _run(self) -> None:
        while True:
            try:
                asked = self._calls.get(timeout=_PROBE_SECONDS if self._failed else None)
            except queue.Empty:
                self._probe()
                continue
            if asked is None:
                return
            future, call = asked
            try:
                future.set_result(call())
            except Exception as error:  # its caller raises it, unless it waits no longer
                log.exception("a call of the Mooncake store failed")
                future.set_exception(error)

    def _probe(self) -> None:
        """Go on with a store that answers again."""
        with self._lock:
            keys, self._leftover = self._leftover, []
        try:
            codes = list(self._store.batch_remove([*keys, "segue/probe"], True))
        except Exception:  # the thread goes on, and asks again
            log.exception("the Mooncake store cannot be asked")
            codes = [-1]
        if all(code in (0, NOT_FOUND) for code in codes):
            self._failed = False
            log.info("the Mooncake store answers again")
            return
        with self._lock:
            self._leftover += keys


def _check_master(master: str) -> None:
    """Raise `ConfigError` for a master that nobody answers at; Mooncake would look for it for a minute and a half."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"master is {master!r}; it must be HOST:PORT", field="master")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"no Mooncake master answers at {master} ({error}); start one there with "
            f"`mooncake_master --rpc_address={host} --rpc_port={port}`",
            field="master",
        ) from error
