"""Copies from a CUDA device to page-locked host memory in chunks, which the device makes by itself: a sender sends the
first chunk while the next one is copied, and the producer's engine goes on at once. Buffers that receive are
page-locked, too, so that the device reads them without a further copy.

CUDA Driver API, "Memory Management": `cuMemHostRegister` locks the pages of memory that exists.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from segue.connectors.device.cuda import Driver, cuda_driver
from segue.connectors.fetching import Buffers

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for all contexts


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes on the host that are being written."""

    data: memoryview
    wait: Callable[[], None]
    """Returns when they are written; it may be called in any thread."""


def staged(bytes_: Tensor) -> list[Chunk]:
    """Begin to copy [n] uint8 from a CUDA device, in its current stream; return the chunks in order.

    The tensor may be freed at once: its memory is used again in the same stream, after the copies.
    """
    count = len(bytes_)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    view, chunks = memoryview(host.numpy()), []  # type: ignore[arg-type]
    stream = torch.cuda.current_stream(bytes_.device)
    for begin in range(0, count, CHUNK_BYTES):
        end = min(count, begin + CHUNK_BYTES)
        host[begin:end].copy_(bytes_[begin:end], non_blocking=True)
        written = torch.cuda.Event()
        written.record(stream)
        chunks.append(Chunk(view[begin:end], written.synchronize))
    return chunks


class PageLocks:
    """Locks the pages of buffers. It calls the driver: a call of the runtime that fails makes torch's next one fail."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def lock(self, buffer: mmap.mmap) -> None:
        """If the system lets the process lock so much memory; else copies from the buffer only take longer."""
        size = ctypes.c_size_t(len(buffer))
        with self._driver.current():
            status = self._driver.status("cuMemHostRegister_v2", _address(buffer), size, ctypes.c_uint(_PORTABLE))
        if status:
            log.warning("a buffer of %d bytes is not page-locked: cuMemHostRegister returned %d", len(buffer), status)

    def unlock(self, buffer: mmap.mmap) -> None:
        """Before a buffer is unmapped; the driver refuses one that is not page-locked, which changes nothing."""
        with self._driver.current():
            self._driver.status("cuMemHostUnregister", _address(buffer))


def page_locked_buffers() -> Buffers:
    """Buffers that the current CUDA device reads by itself; plain ones if there is no driver."""
    driver = cuda_driver(torch.device("cuda", torch.cuda.current_device()))
    if driver is None:
        return Buffers()
    locks = PageLocks(driver)
    return Buffers(locks.lock, locks.unlock)


def _address(buffer: mmap.mmap) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
