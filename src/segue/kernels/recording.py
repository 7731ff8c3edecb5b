"""A function on a CPU as a recording: its calls of the compiled kernels and the small operators between them are run
again from a list by one call, without the Python in between. What a CUDA graph is on a GPU.

The function is run once while `record` looks on. Calls of kernels and simple operators in float32 become entries of a
list for `segue_replay`; their intermediate results go to one arena, where a place is used again as soon as nobody reads
it any more. What is not of that kind stays a call of torch, whose result is copied to where it was at first. Inputs are
the same tensors at every replay, with other values in them.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from segue.kernels.native import Attention, Call, Library

aten = torch.ops.aten
_OPERATORS: dict[Any, int] = {
    aten.neg.default: 1,
    aten.add.Tensor: 2,
    aten.sub.Tensor: 3,
    aten.mul.Tensor: 4,
    aten.mul.Scalar: 4,
    aten.div.Tensor: 5,
    aten.div.Scalar: 5,
}
"""What `each` of kernels.c does, by number; 0 copies."""
_COPIES = (aten.clone.default, aten.contiguous.default, aten.reshape.default, aten._unsafe_view.default)
_EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default)
_TAGS = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view))
"""Of operators whose shape hangs on values, which the host looks at, or that change what a tensor is a view of."""
_UNTAGGED = (aten.where.default, aten.nonzero_numpy.default, aten.repeat_interleave.self_Tensor)
"""Others like that."""
_DIMENSIONS = 4
_ALIGNED = 64
_PRODUCT, _WRITE, _ATTEND, _NORM, _GATE, _EACH = range(6)
_POINTERS = {
    _PRODUCT: (0, 3, 5, 6, 9),
    _WRITE: (0, 3, 6, 9, 12),
    _ATTEND: (2,),
    _NORM: (0, 3, 4),
    _GATE: (0, 1),
    _EACH: (5, 10, 15),
}
"""Which arguments of a call are addresses; those within `struct attention` besides."""
_ATTENDED = ("q", "keys", "values", "blocks", "lengths", "out")


class NotRecordable(Exception):
    """A function that cannot be run again from a recording; the message says why."""


@dataclass(slots=True)
class _Entry:
    """One call of the list, or one of torch."""

    kind: int = -1
    of: list[int] = field(default_factory=list)
    number: float = 0.0
    attention: Attention | None = None
    again: Callable[[], None] | None = None

    def addresses(self) -> Iterator[int]:
        for index in _POINTERS.get(self.kind, ()):
            yield self.of[index]
        if self.attention is not None:
            for name in _ATTENDED:
                yield getattr(self.attention, name)


@dataclass(slots=True)
class _Place:
    """The memory of an intermediate result."""

    base: int
    size: int
    first: int = -1
    last: int = -1
    """Entries that touch it."""
    pinned: bool = False
    """It stays where it is: torch reads or writes it, too, or it is given out."""


class Recording:
    """What `record` made: call it to run again."""

    def __init__(
        self, compiled: Library, entries: list[_Entry], arena: torch.Tensor, kept: list[Any], nbytes: int
    ) -> None:
        self._compiled = compiled
        self._threads = torch.get_num_threads()
        self._arena = arena
        self._kept = kept
        """Whatever entries point to."""
        self.nbytes = nbytes
        """Of intermediate results."""
        self._parts: list[Callable[[], None] | tuple[Any, int]] = []
        of_kernels: list[_Entry] = []
        for entry in [*entries, None]:
            if entry is not None and entry.again is None:
                of_kernels.append(entry)
                continue
            if of_kernels:
                self._parts.append(self._listed(of_kernels))
                of_kernels = []
            if entry is not None and entry.again is not None:
                self._parts.append(entry.again)

    @property
    def calls(self) -> tuple[int, int]:
        """How many calls of kernels there are, and of torch."""
        listed = sum(part[1] for part in self._parts if isinstance(part, tuple))
        return listed, sum(not isinstance(part, tuple) for part in self._parts)

    @torch.inference_mode()
    def __call__(self) -> None:
        for part in self._parts:
            if isinstance(part, tuple):
                self._compiled.replay(self._compiled.number, ctypes.addressof(part[0]), part[1], self._threads)
            else:
                part()

    def _listed(self, entries: list[_Entry]) -> tuple[Any, int]:
        calls = (Call * len(entries))()
        for call, entry in zip(calls, entries, strict=True):
            call.kind, call.number = entry.kind, entry.number
            call.of[: len(entry.of)] = entry.of
            if entry.attention is not None:
                self._kept.append(entry.attention)
                call.of[0] = ctypes.addressof(entry.attention)
        return calls, len(entries)


@torch.no_grad()
def record(compiled: Library, run: Callable[[], Any]) -> tuple[Recording, Any]:
    """Run a function once and note what it does: (what does it again, what it gave).

    Its results are written anew by every run of the recording. What the host decides by values it looks at is decided
    once: whoever records tries the recording on others. Raises `NotRecordable`.
    """
    recorder = _Recorder(compiled)
    with recorder, recorder.listening():
        result = run()
    return recorder.finish(result), result


class _Recorder(TorchDispatchMode):
    def __init__(self, compiled: Library) -> None:
        super().__init__()
        self._compiled = compiled
        self._entries: list[_Entry] = []
        self._made: dict[int, _Place] = {}
        """By address."""
        self._kept: list[Any] = []

    # --- while it runs -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach_.default:  # the last thing `torch.tensor` does: a view of the same, as any other
            return func(*args, **kwargs)
        if func in _UNTAGGED or not _TAGS.isdisjoint(func.tags):
            raise NotRecordable(f"what {func} does hangs on values")
        out = func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        results = list(_tensors(out))
        if any(tensor.device.type != "cpu" or tensor.layout != torch.strided for tensor in (*given, *results)):
            raise NotRecordable("there are tensors on other devices, or not laid out in strides")
        self._kept += [*given, *results]
        known = {_base(tensor) for tensor in given}
        fresh = [tensor for tensor in results if _base(tensor) not in known and tensor.untyped_storage().nbytes()]
        if func._schema.is_mutable:
            if fresh:
                raise NotRecordable(f"{func} changes a tensor and gives another")
            self._by_torch(lambda: func(*args, **kwargs), (*given, *results))
            return out
        for tensor in fresh:
            storage = tensor.untyped_storage()
            self._made[storage.data_ptr()] = _Place(storage.data_ptr(), storage.nbytes())
        if not fresh or func in _EMPTY:
            return out
        if torch.Tag.nondeterministic_seeded in func.tags:  # what dropout gives back at inference is what it was given
            raise NotRecordable(f"{func} draws numbers")
        if not (isinstance(out, torch.Tensor) and self._in_list(func, args, kwargs, out)):
            self._by_torch(_rerun(func, args, kwargs, out), (*given, *results))
        return out

    def _in_list(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> bool:
        """Note an operator that `each` knows; whether it is one."""
        if out.dtype != torch.float32:
            return False
        if func in _COPIES:
            return self._each(0, out.view(args[0].shape), args[0])
        if func is aten.cat.default:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            parts = [part for part in args[0] if part.numel()]
            targets = out.split([part.shape[dim] for part in parts], dim)
            if any(part.dtype != torch.float32 or len(_collapsed(part, part, part)) > _DIMENSIONS for part in parts):
                return False
            return all(self._each(0, target, part) for target, part in zip(targets, parts, strict=True))
        what = _OPERATORS.get(func)
        if what is None or kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
            return False
        return self._each(what, out, *args[:2])

    def _each(self, what: int, out: torch.Tensor, a: Any, b: Any = 0.0) -> bool:
        tensors = [value for value in (a, b) if isinstance(value, torch.Tensor)]
        if not isinstance(a, torch.Tensor) or any(t.dtype != torch.float32 or t.is_neg() for t in tensors):
            return False
        first = a.expand(out.shape)
        second = b.expand(out.shape) if isinstance(b, torch.Tensor) else None
        dims = _collapsed(out, first, first if second is None else second)
        if len(dims) > _DIMENSIONS:
            return False
        dims = [(1, 0, 0, 0)] * (_DIMENSIONS - len(dims)) + dims
        sizes, ys, ps, qs = ([dim[index] for dim in dims] for index in range(4))
        where = 0 if second is None else second.data_ptr()
        of = [what, *sizes, out.data_ptr(), *ys, first.data_ptr(), *ps, where, *(qs if second is not None else [0] * 4)]
        self._entries.append(_Entry(_EACH, of, 0.0 if second is not None else float(b)))
        return True

    def _by_torch(self, again: Callable[[], None], touched: tuple[torch.Tensor, ...]) -> None:
        self._entries.append(_Entry(again=again))
        for tensor in touched:
            if (place := self._made.get(_base(tensor))) is not None:
                place.pinned = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it, calls of the compiled functions are noted."""
        noted = {"product": _PRODUCT, "write": _WRITE, "attend": _ATTEND, "norm": _NORM, "gate": _GATE}
        others = ("full_attention", "modulate")  # not of decode steps
        every: dict[str, Any] = self._compiled._asdict()
        functions = {name: every[name] for name in (*noted, *others)}

        def noting(name: str) -> Callable[[Any, Any, tuple[Any, ...]], Any]:
            def called(result: Any, function: Any, args: tuple[Any, ...]) -> Any:
                if name not in noted:
                    raise NotRecordable(f"{name} is not played back")
                self._called(noted[name], args)
                return result

            return called

        for name, function in functions.items():
            function.errcheck = noting(name)
        try:
            yield
        finally:
            for function in functions.values():
                del function.errcheck

    def _called(self, kind: int, args: tuple[Any, ...]) -> None:
        values = list(args) if kind == _WRITE else list(args[1:-1])  # without the set and threads
        number, attention = 0.0, None
        if kind == _NORM:
            number = values.pop(4)
        if kind == _ATTEND:
            attention = Attention.from_buffer_copy(values[0]._obj)
            values[0] = 0
        self._entries.append(_Entry(kind, [int(value) for value in values], number, attention))

    # --- afterwards --------------------------------------------------------------------------------------------------

    def finish(self, result: Any) -> Recording:
        for tensor in _tensors(result):
            if (place := self._made.get(_base(tensor))) is not None:
                place.pinned = True
        bases = sorted(self._made)

        def place_of(address: int) -> _Place | None:
            index = bisect.bisect_right(bases, address) - 1
            place = self._made[bases[index]] if index >= 0 else None
            return place if place is not None and address < place.base + place.size else None

        for number, entry in enumerate(self._entries):
            for address in entry.addresses():
                if (place := place_of(address)) is not None:
                    place.first = number if place.first < 0 else place.first
                    place.last = number
        moved, size = _arranged([place for place in self._made.values() if place.first >= 0 and not place.pinned])
        arena = torch.empty(size // 4 + _ALIGNED, dtype=torch.float32)
        origin = -(-arena.data_ptr() // _ALIGNED) * _ALIGNED

        def new(address: int) -> int:
            place = place_of(address)
            if place is None or place.base not in moved:
                return address
            return origin + moved[place.base] + address - place.base

        for entry in self._entries:
            for index in _POINTERS.get(entry.kind, ()):
                entry.of[index] = new(entry.of[index])
            if entry.attention is not None:
                for name in _ATTENDED:
                    setattr(entry.attention, name, new(getattr(entry.attention, name)))
        kept = [tensor for tensor in self._kept if _base(tensor) not in moved]
        fixed = sum(place.size for place in self._made.values() if place.pinned)
        return Recording(self._compiled, self._entries, arena, kept, arena.nbytes + fixed)


def _rerun(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Callable[[], None]:
    targets = list(_tensors(out))

    def again() -> None:
        for target, value in zip(targets, _tensors(func(*args, **kwargs)), strict=True):
            target.copy_(value)

    return again


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _base(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _collapsed(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """The loops over tensors of one shape, the longest strides of the first outside: (size, stride of each)."""
    first = tensors[0]
    dims = [(size, *(tensor.stride(dim) for tensor in tensors)) for dim, size in enumerate(first.shape) if size != 1]
    dims.sort(key=lambda dim: -dim[1])
    merged: list[tuple[int, ...]] = []
    for dim in dims:
        if merged and all(outer == inner * dim[0] for outer, inner in zip(merged[-1][1:], dim[1:], strict=True)):
            merged[-1] = (merged[-1][0] * dim[0], *dim[1:])
        else:
            merged.append(dim)
    return merged or [(1, *(0 for _ in tensors))]


def _arranged(places: list[_Place]) -> tuple[dict[int, int], int]:
    """Where each goes in an arena, by address, and the size of that: those that live at once lie apart."""
    offsets: dict[int, int] = {}
    living: list[tuple[int, int, int]] = []
    """(offset, size, last entry), by offset."""
    most = 0
    for place in sorted(places, key=lambda place: place.first):
        living = [other for other in living if other[2] >= place.first]
        size, offset = -(-place.size // _ALIGNED) * _ALIGNED, 0
        for begin, length, _ in living:
            if begin - offset >= size:
                break
            offset = max(offset, begin + length)
        bisect.insort(living, (offset, size, place.last))
        offsets[place.base] = offset
        most = max(most, offset + size)
    return offsets, most
