"""The producer's side of the TCP connector: payloads that wait, and a thread for each consumer that fetches them.

A payload belongs to the producer until a consumer has said `DONE`. If its connection breaks before, the payload waits
again.

    put ─▶ waiting ── GET ─▶ sending ── DONE ─▶ freed
              ▲                 │
              └─ connection lost┘        release frees it in either state
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.connectors.device.staging import Chunk, staged
from segue.connectors.payload import Encoded, as_carrier
from segue.connectors.tcp.wire import (
    ANSWER,
    DONE,
    GET,
    GONE,
    HANDSHAKE_SECONDS,
    POOL_ID,
    REQUEST,
    Refused,
    Remote,
    as_producer,
    receive,
    send_parts,
    tune,
)
from segue.messages.errors import ConfigError

log = logging.getLogger(__name__)

MOST_CONSUMERS = 1024
"""Connections at a time; there is one per worker that fetches here."""


Part = memoryview | bytes | Chunk


@dataclass(slots=True)
class _Held:
    request_id: str
    parts: list[Part]
    size: int
    sending: bool = False


class Producer:
    """The payloads that one worker offers at `host`:`port`. Thread-safe."""

    def __init__(self, host: str, key: bytes, max_bytes: int) -> None:
        """`host`: the address of the interface to listen on. Raises `ConfigError` if it is not one of this machine."""
        self._key = key
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._requests: dict[str, set[int]] = {}
        self._last = 0
        self.bytes_in_use = 0
        self.pool_id = os.urandom(POOL_ID)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listening.bind((host, 0))
            self._listening.listen(MOST_CONSUMERS)
        except OSError as error:
            self._listening.close()
            raise ConfigError(f"cannot listen on {host!r}: {error.strerror or error}", field="address") from error
        self.host: str = host
        self.port: int = self._listening.getsockname()[1]
        self._consumers: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="segue-tcp-listen", daemon=True)
        self._acceptor.start()

    def offer(self, request_id: str, encoded: Encoded) -> Remote | None:
        """Keep a payload until it is fetched or released; return its place, or None if there is no space now."""
        with self._lock:
            if self.bytes_in_use + encoded.size > self._max_bytes:
                return None
            self.bytes_in_use += encoded.size
        try:
            held = _Held(request_id, buffers_of(encoded), encoded.size)
        except BaseException:
            with self._lock:
                self.bytes_in_use -= encoded.size
            raise
        with self._lock:
            self._last += 1
            self._held[self._last] = held
            self._requests.setdefault(request_id, set()).add(self._last)
            return Remote(self.host, self.port, self.pool_id, self._last, encoded.size)

    def release(self, request_id: str) -> None:
        """Free the payloads of a request. One that is being sent then ends its consumer's fetch as usual."""
        with self._lock:
            for number in self._requests.get(request_id, set()).copy():
                self._free(number)

    def withdraw(self, number: int) -> None:
        """Free one payload; unknown numbers are ignored."""
        with self._lock:
            self._free(number)

    def close(self) -> None:
        """Disconnect every consumer and free everything."""
        with self._lock:
            self._closing.set()
            consumers = dict(self._consumers)
        end(self._listening)
        self._acceptor.join()
        for sock, thread in consumers.items():
            end(sock)
            thread.join()
        with self._lock:
            self._held.clear()
            self._requests.clear()
            self.bytes_in_use = 0

    def _free(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is None:
            return
        self.bytes_in_use -= held.size
        numbers = self._requests[held.request_id]
        numbers.discard(number)
        if not numbers:
            del self._requests[held.request_id]

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listening.accept()
            except OSError as error:
                if self._closing.wait(0.1):
                    return
                log.error("no consumer can connect: %s", error)  # e.g. too many open files: others may close some
                continue
            with self._lock:
                if self._closing.is_set() or len(self._consumers) >= MOST_CONSUMERS:
                    sock.close()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(sock, address[0]), name="segue-tcp-send", daemon=True
                )
                self._consumers[sock] = thread
                thread.start()

    def _serve(self, sock: socket.socket, address: str) -> None:
        sending: set[int] = set()
        try:
            tune(sock)
            sock.settimeout(HANDSHAKE_SECONDS)
            as_producer(sock, self._key, self.pool_id)
            sock.settimeout(None)  # a consumer may fetch nothing for hours; the kernel notices one that is gone
            while True:
                what, number = REQUEST.unpack(receive(sock, REQUEST.size))
                if what == GET:
                    self._send(sock, number, sending)
                elif what == DONE and number in sending:
                    sending.discard(number)
                    self.withdraw(number)
                else:
                    raise Refused(f"a consumer sent the unknown request {what}")
        except Refused as error:
            log.warning("%s (%s): it gets nothing", error, address)
        except OSError as error:
            if not self._closing.is_set():
                log.debug("a consumer at %s is gone: %s", address, error)
        except RuntimeError as error:  # of torch: the worker's next call on the device fails as well
            log.error("a payload was not copied from its device: %s", error)
        finally:
            sock.close()
            with self._lock:
                self._consumers.pop(sock, None)
                for number in sending & self._held.keys():
                    self._held[number].sending = False

    def _send(self, sock: socket.socket, number: int, sending: set[int]) -> None:
        with self._lock:
            held = self._held.get(number)
            if held is not None and held.sending:
                held = None
            if held is not None:
                held.sending = True
                sending.add(number)
        if held is None:
            sock.sendall(ANSWER.pack(GONE))
        else:
            send_as_written(sock, [ANSWER.pack(held.size), *held.parts])


def end(sock: socket.socket) -> None:
    """Close a socket in which another thread may wait."""
    with contextlib.suppress(OSError):  # it may be connected no more
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def send_as_written(sock: socket.socket, parts: Sequence[Part]) -> None:
    """Send parts in order, each chunk as soon as it is written: those before it do not wait for it."""
    ready: list[memoryview | bytes] = []
    for part in parts:
        if isinstance(part, Chunk):
            send_parts(sock, ready)
            part.wait()
            ready = [part.data]
        else:
            ready.append(part)
    send_parts(sock, ready)


def buffers_of(encoded: Encoded) -> list[Part]:
    """Return the bytes of a payload as parts in order; tensors on the CPU that are contiguous are not copied, those on
    a device begin to be copied."""
    found: list[Part] = []
    at = 0
    for offset, part in encoded.laid_out():
        if offset > at:
            found.append(bytes(offset - at))
        if isinstance(part, bytes):
            found.append(part)
            at = offset + len(part)
        else:
            found += _parts_of(part)
            at = offset + part.numel() * part.dtype.itemsize
    if encoded.size > at:
        found.append(bytes(encoded.size - at))
    return found


def _parts_of(tensor: Tensor) -> Sequence[Part]:
    carrier = as_carrier(tensor).contiguous().reshape(-1).view(torch.uint8)
    if carrier.is_cuda:
        return staged(carrier)
    return [memoryview(carrier.cpu().numpy())]  # type: ignore[arg-type]
