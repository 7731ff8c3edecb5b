"""Copies from a CUDA device to page-locked host memory in chunks, which the device makes by itself: a sender sends the
first chunk while the next one is copied, and whoever produced the tensor goes on at once. Buffers that receive are
page-locked, too, so that the device reads them without a further copy.

CUDA Runtime API, "Memory Management": `cudaHostRegister` locks the pages of memory that exists.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all contexts


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


def lock_pages(buffer: mmap.mmap) -> None:
    """Page-lock a buffer, if the system lets the process lock so much memory; else copies from it only take longer."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    status = int(torch.cuda.cudart().cudaHostRegister(address, len(buffer), _PORTABLE))
    if status:
        log.warning("a buffer of %d bytes is not page-locked: cudaHostRegister returned %d", len(buffer), status)


def unlock_pages(buffer: mmap.mmap) -> None:
    """Before a buffer is unmapped; one that is not page-locked is left alone."""
    torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
