"""Workers of one stage on one CPU share their weights: one copy in a memfd, mapped by each.

    fork server ── creates the memfd, keeps it, and each worker inherits it by fork
    first worker ── loads and prepares the weights, moves them into the memfd region by region, seals it
    other workers ── do the same, but replace each region by the memfd's if its bytes are equal

So a worker shares only what is equal by comparison, and correctness depends on nothing else. Workers load one at a
time, by a lock of the memfd; the kernel releases it when its holder dies, and the next worker fills an unsealed memfd
anew. The sealed memfd lives as long as the fork server: it does not matter whether the worker that made it still lives.

Mappings are private: a worker that wrote to a weight would get its own copy of that page. Weights that torch does not
see as parameters or buffers of a module, such as layers packed by oneDNN or FBGEMM, are not shared.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import hashlib
import logging
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import torch
from torch import nn

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 16
"""Smaller regions are not shared."""
_HUGE = 2 << 20
_SAMPLES = 16
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_MAP_FIXED = 0x10
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A region of the memfd."""

    key: bytes
    start: int
    nbytes: int


@dataclass(slots=True)
class _Region:
    """Bytes of a storage that tensors of this process use."""

    start: int
    """Address."""
    end: int
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def bytes(self) -> torch.Tensor:
        """[nbytes] uint8, over the same memory."""
        return _bytes_at(self.start, self.nbytes)

    def move(self, to: int) -> None:
        """Make its tensors those at another address, where the same bytes are."""
        storage = _bytes_at(to, self.nbytes).untyped_storage()
        for tensor in self.tensors:
            offset = (tensor.data_ptr() - self.start) // tensor.element_size()
            tensor.set_(storage, offset, tensor.size(), tensor.stride())


@contextmanager
def one_at_a_time(fd: int) -> Iterator[None]:
    """Hold the memfd's lock, so that its other workers neither load nor fill it meanwhile."""
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def modules() -> list[nn.Module]:
    """Return all modules that this process made since it was forked: those of its stages."""
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]


def share(fd: int, networks: Iterable[nn.Module]) -> int:
    """Move the weights of networks on the CPU into the memfd if it is empty, else to equal weights in it; return the
    bytes that are shared. Call it under `one_at_a_time`, before anything holds addresses of weights.

    If memory is short, weights stay where they are, with a warning.
    """
    regions = [region for region in _regions(networks) if region.nbytes >= LEAST_BYTES]
    if not regions:
        return 0
    with torch.inference_mode():
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
            return _adopt(fd, regions)
        try:
            return _fill(fd, regions)
        except OSError as error:
            log.warning("weights are not shared between the workers of the stage: %s", error)
            return 0


def _fill(fd: int, regions: list[_Region]) -> int:
    """Write the regions to the memfd one by one, and free each as soon as it is there."""
    entries, place = [], 0
    for region in regions:
        entries.append(_Entry(_key(region), place, region.nbytes))
        place += -(-region.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    index = msgspec.msgpack.encode(entries)
    first = -(-(8 + len(index)) // _HUGE) * _HUGE
    os.ftruncate(fd, 0)  # what a worker that died has written
    os.posix_fallocate(fd, 0, first + place)  # now, and not by a fault that would kill the worker
    os.pwrite(fd, len(index).to_bytes(8, "big") + index, 0)
    base = _mapped(fd, first, place)
    try:
        for region, entry in zip(regions, entries, strict=True):
            _write(fd, region.bytes(), first + entry.start)
            region.move(base + entry.start)
        _libc().madvise(base, place, _MADV_COLLAPSE)
    finally:  # whatever is in use now must stay
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return sum(region.nbytes for region in regions)


def _adopt(fd: int, regions: list[_Region]) -> int:
    """Replace the regions that have a counterpart in the memfd."""
    length = int.from_bytes(os.pread(fd, 8, 0), "big")
    entries = msgspec.msgpack.decode(os.pread(fd, length, 8), type=list[_Entry])
    first = -(-(8 + length) // _HUGE) * _HUGE
    base = _mapped(fd, first, os.fstat(fd).st_size - first)
    known: dict[bytes, list[int]] = {}
    for entry in entries:
        known.setdefault(entry.key, []).append(entry.start)
    shared = 0
    for region in regions:
        for start in known.get(_key(region), ()):
            if torch.equal(region.bytes(), _bytes_at(base + start, region.nbytes)):
                region.move(base + start)
                shared += region.nbytes
                break
    return shared


def _regions(networks: Iterable[nn.Module]) -> list[_Region]:
    """Return the memory of all parameters and buffers on the CPU, without what is mapped from a file: processes share
    that already."""
    spans: dict[int, tuple[int, int, torch.Tensor]] = {}
    files = _file_mappings()
    for network in networks:
        for tensor in (*network.parameters(recurse=False), *network.buffers(recurse=False)):
            if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
                continue
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                continue
            start = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            if not _within(files, start):
                spans[id(tensor)] = start, start + (last + 1) * tensor.element_size(), tensor
    regions: list[_Region] = []
    for start, end, tensor in sorted(spans.values(), key=lambda span: span[:2]):
        if not regions or start >= regions[-1].end:
            regions.append(_Region(start, end))
        regions[-1].end = max(regions[-1].end, end)
        regions[-1].tensors.append(tensor)
    return regions


def _file_mappings() -> list[tuple[int, int]]:
    """Return the address ranges of this process that map files, in order."""
    found = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, _, _, _, inode, *_ = line.split()
            if inode != "0":
                start, _, end = span.partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found


def _within(ranges: list[tuple[int, int]], address: int) -> bool:
    place = bisect_right(ranges, (address, 1 << 64)) - 1
    return place >= 0 and address < ranges[place][1]


def _key(region: _Region) -> bytes:
    """Return a hash of the region's size and of samples: equal for equal regions, and seldom for others."""
    data = region.bytes()
    step = max(mmap.PAGESIZE, region.nbytes // _SAMPLES)
    found = hashlib.blake2b(region.nbytes.to_bytes(8, "big"), digest_size=16)
    for start in range(0, region.nbytes, step):
        found.update(data[start : start + mmap.PAGESIZE].numpy().data)
    return found.digest()


def _write(fd: int, data: torch.Tensor, place: int) -> None:
    view = data.numpy().data
    while view:
        written = os.pwrite(fd, view, place)
        view, place = view[written:], place + written


def _mapped(fd: int, start: int, nbytes: int) -> int:
    """Map a part of the memfd for the life of the process, aligned to huge pages; return its address."""
    libc = _libc()
    room = libc.mmap(None, nbytes + _HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    aligned = -(-room // _HUGE) * _HUGE if room != _FAILED else 0
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    if not aligned or libc.mmap(aligned, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, start) != aligned:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {nbytes} bytes of weights: {os.strerror(number)}")
    libc.madvise(aligned, nbytes, _MADV_HUGEPAGE)  # where the system has huge pages of memfds only on request
    return aligned


_FAILED = ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    """Return the C library: Python's `mmap` cannot align."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """Return [nbytes] uint8 over the memory at an address, without owning it."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
