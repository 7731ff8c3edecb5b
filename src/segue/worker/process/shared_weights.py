"""Workers of one stage on one device share their weights: one copy, mapped by each.

    fork server ── makes a `WeightsStore` for each stage and device, and each worker inherits it by fork
    first worker ── loads and prepares the weights, moves them into the store region by region, seals it
    other workers ── do the same, but replace each region by the store's if its bytes are equal

So a worker shares only what is equal by comparison, and correctness depends on nothing else. Workers load one at a
time, by the store's lock; if one dies while it fills the store, the next worker fills it anew. A sealed store lives
until the last of its workers has ended: it does not matter whether the worker that filled it still lives.

`Memory` is where the weights lie: `host_weights` is that of a CPU, `cuda_weights` that of a GPU. Weights that torch
does not see as parameters or buffers of a module, such as layers packed by oneDNN or FBGEMM, are not shared.

Optional reading: `load_shared` gives a network the weights that another worker of its stage has loaded.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import nn

from segue.worker.process.cuda_weights import cuda_weights
from segue.worker.process.host_weights import HostWeights
from segue.worker.process.weights_store import WeightsStore

log = logging.getLogger(__name__)

LEAST_BYTES = 1 << 16
"""Smaller regions are not shared."""
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 12
_PIECE_BYTES = 64 << 20
"""Compared at a time: on a GPU a comparison takes as much memory as its operands have elements."""
_REFUSED = (OSError, RuntimeError)
"""Errors of the system, and of torch and the driver of a GPU (`CudaError`)."""

T = TypeVar("T")


class Memory(Protocol):
    """Memory of a store, as one worker maps it for the life of its process: it fills it (`create`, `write`, `keep`) or
    opens it. Errors are `OSError` or `RuntimeError`."""

    align: int
    """Places in it are multiples of so many bytes."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on its device, in memory of this process alone."""

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """Return [nbytes] uint8 over memory of its device, without owning it."""

    def create(self, nbytes: int) -> int:
        """Reserve addresses for so many bytes of weights; return the first one."""

    def write(self, data: torch.Tensor, place: int) -> None:
        """Copy [n] uint8 to a place, in bytes from the first address. Places are given in order."""

    def keep(self) -> None:
        """Give the store what was written, and seal it."""

    def open(self) -> tuple[int, int]:
        """Map what the store has; return the first address and the number of bytes."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A region of the store."""

    key: bytes
    start: int
    nbytes: int


@dataclass(slots=True)
class _Region:
    """Bytes of a storage that tensors of this process use."""

    memory: Memory
    start: int
    """Address."""
    end: int
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def bytes(self) -> torch.Tensor:
        """[nbytes] uint8, over the same memory."""
        return self.memory.bytes_at(self.start, self.nbytes)

    def move(self, to: int) -> None:
        """Make its tensors those at another address, where the same bytes are."""
        storage = self.memory.bytes_at(to, self.nbytes).untyped_storage()
        for tensor in self.tensors:
            offset = (tensor.data_ptr() - self.start) // tensor.element_size()
            tensor.set_(storage, offset, tensor.size(), tensor.stride())


def load_shared(store: WeightsStore, device: torch.device, load: Callable[[], T]) -> tuple[T, int]:
    """Load a stage model while no other worker of the stage does, and share its weights on a device; return the model
    and the bytes that are shared. Call it before anything holds addresses of weights."""
    with store.locked():
        older = _modules()
        model = load()
        memory = HostWeights(store) if device.type == "cpu" else cuda_weights(store, device)
        return model, 0 if memory is None else share(store, memory, _modules(), older)


def share(store: WeightsStore, memory: Memory, networks: Iterable[nn.Module], older: Iterable[nn.Module] = ()) -> int:
    """Move the weights of networks into the memory of the store if it is empty, else to equal weights in it; return the
    bytes that are shared. Call it under the store's lock.

    `older`: networks whose weights stay where they are, even if they are weights of `networks`, too: a captured graph
    has their addresses. If memory is short, weights stay where they are, with a warning.
    """
    regions = [region for region in _regions(memory, networks, older) if region.nbytes >= LEAST_BYTES]
    if not regions:
        return 0
    with torch.inference_mode():
        try:
            return _adopt(store, memory, regions) if store.sealed else _fill(store, memory, regions)
        except _REFUSED as error:
            log.warning("weights are not shared between the workers of the stage: %s", error)
            return 0


def _modules() -> list[nn.Module]:
    """Return all modules that this process made since it was forked: those of its stages."""
    return [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]


def _fill(store: WeightsStore, memory: Memory, regions: list[_Region]) -> int:
    """Write the regions to the store one by one, and free each as soon as it is there."""
    entries, place = [], 0
    for region in regions:
        entries.append(_Entry(_key(region), place, region.nbytes))
        place += -(-region.nbytes // memory.align) * memory.align
    store.begin(msgspec.msgpack.encode(entries))
    base = memory.create(place)
    shared = 0
    try:
        for region, entry in zip(regions, entries, strict=True):
            memory.write(region.bytes(), entry.start)
            region.move(base + entry.start)
            shared += region.nbytes
    except _REFUSED as error:
        if not shared:
            raise
        log.warning("only %d bytes of weights are shared between the workers of the stage: %s", shared, error)
    finally:  # whatever is in use now must stay
        memory.keep()
    return shared


def _adopt(store: WeightsStore, memory: Memory, regions: list[_Region]) -> int:
    """Replace the regions that have a counterpart in the store."""
    base, mapped = memory.open()
    known: dict[bytes, list[int]] = {}
    for entry in msgspec.msgpack.decode(store.index, type=list[_Entry]):
        if entry.start + entry.nbytes <= mapped:  # the worker that filled it had memory for it
            known.setdefault(entry.key, []).append(entry.start)
    shared = 0
    for region in regions:
        for start in known.get(_key(region), ()):
            if _equal(region.bytes(), memory.bytes_at(base + start, region.nbytes)):
                region.move(base + start)
                shared += region.nbytes
                break
    return shared


def _regions(memory: Memory, networks: Iterable[nn.Module], older: Iterable[nn.Module]) -> list[_Region]:
    """Return the memory of all parameters and buffers of networks that it owns, without that of `older` networks."""
    fixed = {tensor.untyped_storage().data_ptr() for tensor in _tensors(memory, older)}
    spans: dict[int, tuple[int, int, torch.Tensor]] = {}
    for tensor in _tensors(memory, networks):
        if tensor.untyped_storage().data_ptr() not in fixed:
            start = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            spans[id(tensor)] = start, start + (last + 1) * tensor.element_size(), tensor
    regions: list[_Region] = []
    for start, end, tensor in sorted(spans.values(), key=lambda span: span[:2]):
        if not regions or start >= regions[-1].end:
            regions.append(_Region(memory, start, end))
        regions[-1].end = max(regions[-1].end, end)
        regions[-1].tensors.append(tensor)
    return regions


def _tensors(memory: Memory, networks: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for network in networks:
        for tensor in (*network.parameters(recurse=False), *network.buffers(recurse=False)):
            plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided
            if plain and tensor.numel() and memory.owns(tensor):
                yield tensor


def _key(region: _Region) -> bytes:
    """Return a hash of the region's size and of samples: equal for equal regions, and seldom for others."""
    data = region.bytes()
    step = max(_SAMPLE_BYTES, region.nbytes // _SAMPLES)
    found = hashlib.blake2b(region.nbytes.to_bytes(8, "big"), digest_size=16)
    for start in range(0, region.nbytes, step):
        found.update(data[start : start + _SAMPLE_BYTES].cpu().numpy().data)
    return found.digest()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two [n] uint8 are equal."""
    return all(map(torch.equal, one.split(_PIECE_BYTES), other.split(_PIECE_BYTES)))
