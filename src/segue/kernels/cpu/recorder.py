"""Makes recordings: `record` runs a function once and records its calls.

Calls of the compiled kernels and simple float32 operators become entries of a list; everything else becomes a call of
torch. Intermediate results get regions in one arena, which are reused after their last read. While the function runs,
recording holds no tensor that the function itself does not hold, so it takes no more memory than running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from segue.kernels.cpu.arena import ALIGNED, Places, Region, arrange
from segue.kernels.cpu.native import Attention, Experts, FullAttention, Library
from segue.kernels.cpu.recording import (
    ATTEND,
    DRAW,
    EACH,
    EXPERTS,
    FULLY,
    GATE,
    GEMM,
    MODULATE,
    NORM,
    POINTED,
    POINTERS,
    ROPE,
    SNAKE,
    WRITE,
    Entry,
    Recording,
)
from segue.kernels.graphs.cuda_capture import leaves, mapped
from segue.kernels.graphs.replay import ACTIVE, NotRecordable, TooLarge

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
"""Operator numbers of `each` in kernels.c; 0 copies."""
_COPIES = (aten.clone.default, aten.contiguous.default, aten.reshape.default, aten._unsafe_view.default)
_EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default)
_TAGS = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view))
"""Of operators whose output shape depends on values that the host reads, or that change what a tensor is a view of."""
_UNTAGGED = (
    aten.where.default,
    aten.nonzero_numpy.default,
    aten.repeat_interleave.self_Tensor,
    aten.one_hot.default,
)
"""Further such operators without these tags."""
_ASKS = aten.is_nonzero.default
"""The host branches on its result. Not always refused: the library's decoders test a mask that no layer uses."""
_LOOKS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__)
"""Functions that pass values to the host and are not operators."""
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that do so for tensors in lists."""
_DIMENSIONS = 4
_KERNELS = {
    "product": GEMM,
    "write": WRITE,
    "attend": ATTEND,
    "norm": NORM,
    "gate": GATE,
    "full_attention": FULLY,
    "modulate": MODULATE,
    "turn": ROPE,
    "experts": EXPERTS,
    "draw": DRAW,
    "snake": SNAKE,
}
_STRUCTURES: dict[int, type[Attention | Experts | FullAttention]] = {
    ATTEND: Attention,
    EXPERTS: Experts,
    FULLY: FullAttention,
}
_NUMBERS = {NORM: 4, MODULATE: 4, ROPE: 4, DRAW: 6}
"""Index of the floating-point argument of a call."""


@torch.no_grad()
def record(
    compiled: Library, run: Callable[[], Any], arena: torch.Tensor | None = None, *, branches: bool = True
) -> tuple[Recording, Any]:
    """Run a function once and record its calls: (the recording, the result of this run).

    The function returns tensors in lists, tuples and dictionaries; a recording writes to others (`Recording.result`).
    A function that passes values to the host, except through `anew`, is refused. Two ways are undetected: reading
    memory by address and, unless `branches` is False, testing whether a tensor is true. A replay always takes the
    recorded branch, so callers must verify it on other values. `arena`: uint8, for results and intermediates;
    recordings that never run at once may share one, and a result is valid until the next recording runs.
    Raises `NotRecordable`; `TooLarge` if the arena is too small.
    """
    recorder = _Recorder(compiled, branches=branches)
    active = ACTIVE.set(recorder)
    try:
        with _Watching(recorder), recorder, recorder.listening():
            result = run()
    finally:
        ACTIVE.reset(active)
    with torch.inference_mode():
        return recorder.finish(result, arena), result


class _Recorder(TorchDispatchMode):
    def __init__(self, compiled: Library, *, branches: bool) -> None:
        super().__init__()
        self._compiled = compiled
        self._branches = branches
        self._steps: list[Entry | _ByTorch] = []
        self._places = Places()
        self._kept: dict[int, torch.Tensor] = {}
        """By address: tensors that are not intermediate results."""
        self.aside = False
        """A function is running whose calls are not recorded."""

    # --- while it runs -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.aside or func is aten.detach_.default:  # `torch.tensor` ends with it: a view of the same memory
            return func(*args, **kwargs)
        if func in _UNTAGGED or (not _TAGS.isdisjoint(func.tags) and not _by_places(func, args)):
            raise NotRecordable(f"{func} depends on tensor values")
        if func is _ASKS and not self._branches:
            raise NotRecordable("it branches on the value of a tensor")
        given = list(leaves((args, kwargs), torch.Tensor))
        out = func(*args, **kwargs)
        results = list(leaves(out, torch.Tensor))
        if given and func is not _ASKS and not _tensors(out):
            raise NotRecordable(f"{func} returns values that are not tensors")
        if any(tensor.device.type != "cpu" or tensor.layout != torch.strided for tensor in (*given, *results)):
            raise NotRecordable("some tensors are on other devices, or have no strided layout")
        known = {_base(tensor): tensor for tensor in given}
        self._kept |= {base: tensor for base, tensor in known.items() if self._places.of(base) is None}
        fresh = [tensor for tensor in results if _base(tensor) not in known and tensor.untyped_storage().nbytes()]
        if func._schema.is_mutable:
            if _draws(func, args, kwargs):
                raise NotRecordable(f"{func} draws random numbers")
            if fresh:
                raise NotRecordable(f"{func} changes one tensor and returns another")
            self._by_torch(func, args, kwargs, None)
            return out
        for tensor in {_base(tensor): tensor for tensor in fresh}.values():
            self._places.add(tensor)
        if not fresh or func in _EMPTY:
            return out
        if _draws(func, args, kwargs):  # after the check above: dropout at inference returns its input
            raise NotRecordable(f"{func} draws random numbers")
        if not (isinstance(out, torch.Tensor) and self._in_list(func, args, kwargs, out)):
            self._by_torch(func, args, kwargs, out)
        return out

    def anew(self, function: Callable[..., torch.Tensor], given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        self.aside = True
        try:
            out = function(*given).clone()
        finally:
            self.aside = False
        self._places.add(out)
        self._by_torch(function, given, {}, out)
        return out

    def _in_list(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> bool:
        """Record an operator that `each` implements; returns whether it is one."""
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
        self._note(Entry(EACH, of, 0.0 if second is not None else float(b)))
        return True

    def _note(self, entry: Entry) -> None:
        addresses: list[tuple[int | str, int]] = [(index, entry.of[index]) for index in POINTERS[entry.kind]]
        if entry.structure is not None:
            names = POINTED[type(entry.structure)]
            addresses += [(name, getattr(entry.structure, name) or 0) for name in names]
        for where, address in addresses:
            if (place := self._places.of(address)) is not None:
                entry.lies.append((where, place))
                self._touched(place)
        self._steps.append(entry)

    def _by_torch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        lying = (mapped(value, torch.Tensor, self._lying) for value in (args, kwargs, out))
        self._steps.append(_ByTorch(func, *lying))

    def _lying(self, tensor: torch.Tensor) -> torch.Tensor | _Lying:
        """A placeholder for an intermediate result; any other tensor itself."""
        place = self._places.of(_base(tensor))
        if place is None:
            return tensor
        self._touched(place)
        if tensor.is_conj() or tensor.is_neg():
            place.kept = tensor
            return tensor
        where = tensor.data_ptr() - place.base if tensor.numel() else 0
        return _Lying(place, tensor.dtype, where, tuple(tensor.shape), tensor.stride())

    def _touched(self, place: Region) -> None:
        number = len(self._steps)
        place.first = number if place.first < 0 else place.first
        place.last = number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it, calls of the compiled kernels are recorded."""
        every: dict[str, Any] = self._compiled._asdict()

        def noting(kind: int) -> Callable[[Any, Any, tuple[Any, ...]], Any]:
            def called(result: Any, function: Any, args: tuple[Any, ...]) -> Any:
                if ACTIVE.get() is self and not self.aside:  # other threads call them, too
                    self._called(kind, args)
                return result

            return called

        for name, kind in _KERNELS.items():
            every[name].errcheck = noting(kind)
        try:
            yield
        finally:
            for name in _KERNELS:
                del every[name].errcheck

    def _called(self, kind: int, args: tuple[Any, ...]) -> None:
        values = list(args) if kind == WRITE else list(args[1:-1])  # without the instruction set and threads
        number = values.pop(_NUMBERS[kind]) if kind in _NUMBERS else 0.0
        structure = None
        if kind in _STRUCTURES:
            structure = _STRUCTURES[kind].from_buffer_copy(values[0]._obj)
            values[0] = 0
        if kind == FULLY and structure is not None and structure.blocks:
            raise NotRecordable("full attention over a paged store takes the lengths of its sequences as arguments")
        self._note(Entry(kind, [int(value) for value in values], number, structure))

    # --- afterwards --------------------------------------------------------------------------------------------------

    def finish(self, result: Any, arena: torch.Tensor | None) -> Recording:
        if not _tensors(result):
            raise NotRecordable(f"it returns {type(result).__name__}, which may contain anything")
        lying = mapped(result, torch.Tensor, self._lying)  # counts as touched after the last step
        size = arrange(self._places.all)
        if arena is None:
            arena = torch.empty(size + ALIGNED, dtype=torch.uint8)
        if size + ALIGNED > arena.nbytes:
            raise TooLarge(f"its intermediate results take {size} bytes, of {arena.nbytes}", result)
        memory = arena.untyped_storage()
        begin = arena.data_ptr() - memory.data_ptr() + -arena.data_ptr() % ALIGNED
        steps: list[Entry | Callable[[], None]] = []
        for step in self._steps:
            if isinstance(step, Entry):
                step.move(memory.data_ptr() + begin)
                steps.append(step)
            else:
                steps.append(step.placed(memory, begin))
        fixed = [place.kept for place in self._places.all if place.kept is not None]
        return Recording(
            self._compiled,
            steps,
            mapped(lying, _Lying, lambda one: one.tensor(memory, begin)),
            kept=[arena, *fixed, *self._kept.values()],
            nbytes=size + sum(tensor.untyped_storage().nbytes() for tensor in fixed),
        )


@dataclass(frozen=True, slots=True)
class _Lying:
    """Placeholder for a tensor that is an intermediate result."""

    place: Region
    dtype: torch.dtype
    where: int
    """Byte offset in its region."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self, arena: torch.UntypedStorage, begin: int) -> torch.Tensor:
        kept = self.place.kept
        storage = arena if kept is None else kept.untyped_storage()
        first = self.where + (begin + self.place.offset if kept is None else 0)
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(storage, first // made.itemsize, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _ByTorch:
    """A call of torch on tensors and placeholders; `out`: its result, None if it changes its arguments instead."""

    func: Any
    args: Any
    kwargs: Any
    out: Any

    def placed(self, arena: torch.UntypedStorage, begin: int) -> Callable[[], None]:
        """The call with its placeholders replaced by tensors in the arena."""
        func = self.func
        args, kwargs, out = (
            mapped(value, _Lying, lambda lying: lying.tensor(arena, begin))
            for value in (self.args, self.kwargs, self.out)
        )
        targets = list(leaves(out, torch.Tensor))
        if not targets:
            return lambda: func(*args, **kwargs)

        def again() -> None:
            for target, value in zip(targets, leaves(func(*args, **kwargs), torch.Tensor), strict=True):
                target.copy_(value)

        return again


class _Watching(TorchFunctionMode):
    """Within it, functions that pass values to the host without an operator call are refused."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        looks = func in _LOOKS or (func in _MAKERS and any(_holds_tensors(value) for value in args))
        if looks and not self._recorder.aside:
            raise NotRecordable(f"{func.__name__} passes values to the host")
        return func(*args, **(kwargs or {}))


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and next(leaves(value, torch.Tensor), None) is not None


def _tensors(value: Any) -> bool:
    """Whether a value consists only of tensors, lists, tuples, dictionaries and None."""
    if type(value) in (list, tuple):
        return all(map(_tensors, value))
    if type(value) is dict:
        return all(map(_tensors, value.values()))
    return value is None or isinstance(value, torch.Tensor)


def _by_places(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it indexes with integers; only boolean masks make the output shape depend on values."""
    return func is aten.index.Tensor and all(places is None or places.dtype == torch.long for places in args[1])


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropped = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(dropped)
    return True


def _base(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _collapsed(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """The merged loops over tensors of one shape, outermost the largest stride of the first: (size, stride of each)."""
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
