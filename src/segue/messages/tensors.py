"""Named tensors as inputs: what a model's graph declares (`TensorSpec`), and the check of a request's tensors.

A tensor travels as a `MediaPart` whose kind is its declared name and whose data are a raw array. One part may hold one
item, in the declared shape, or several, with an axis in front.

Optional reading: only for models that declare tensors as input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from segue.messages.errors import InvalidRequest, nearest, shown
from segue.messages.request import ArrayInfo, MediaPart

DTYPES = ("float32", "float16", "int64", "int32", "uint8", "bool")
"""The dtypes that a graph may declare."""


class TensorSpec(msgspec.Struct, frozen=True):
    """A named tensor that a model takes."""

    name: str
    dtype: str
    """One of `DTYPES`. Floats must be finite."""
    shape: tuple[int | None, ...]
    """Shape of one item; None: any size from 1."""
    tokens: int
    """Tokens that an item takes in the sequence: 1, or one for each entry of its first axis."""
    most: int
    """Most items in one request, appended ones included."""

    def __str__(self) -> str:
        """E.g. `actions: float32 [6, 3], 6 tokens, at most 15`."""
        return f"{self.name}: {self.dtype} {_sizes(self.shape)}, {self.tokens} tokens, at most {self.most}"


def items_of(part: MediaPart, spec: TensorSpec) -> np.ndarray:
    """The items of a part: [items, *shape] in the declared dtype, read-only. Raises `InvalidRequest` naming the field,
    its value and what is right."""
    info = part.array
    assert info is not None, "tensors are raw arrays"
    several = len(info.shape) == len(spec.shape) + 1
    shape = info.shape[1:] if several else info.shape
    fits = len(shape) == len(spec.shape) and all(
        size == wanted if wanted is not None else size > 0 for size, wanted in zip(shape, spec.shape, strict=True)
    )
    if not fits or 0 in info.shape:
        right = f"{_sizes(spec.shape)}, or {_sizes(('items', *spec.shape))} for several items"
        raise _wrong(part, "shape", list(info.shape), right)
    if info.dtype != spec.dtype and not (info.written and info.dtype in ("float64", "int64")):
        raise _wrong(part, "dtype", info.dtype, spec.dtype)
    wanted = math.prod(info.shape) * np.dtype(info.dtype).itemsize
    if len(part.data) != wanted:
        raise _wrong(part, "data", f"{len(part.data)} bytes", f"{wanted} for shape {list(info.shape)} of {info.dtype}")
    given = np.frombuffer(part.data, np.dtype(info.dtype).newbyteorder("<")).reshape(info.shape)
    with np.errstate(over="ignore"):
        made = given if info.dtype == spec.dtype else given.astype(spec.dtype)
    if made.dtype.kind == "f" and not np.isfinite(made).all():
        raise _wrong(part, "data", f"a tensor with {made[~np.isfinite(made)].flat[0]}", f"finite in {spec.dtype}")
    if made.dtype.kind != "f" and not np.array_equal(made, given):
        raise _wrong(part, "data", f"a list with {given[made != given].flat[0]}", f"of {spec.dtype}")
    return made if several else made[None]


def check_tensors(parts: Iterable[MediaPart], specs: Mapping[str, TensorSpec], counts: dict[str, int]) -> None:
    """Check tensors against what the model declares. `counts`: name → items so far, to which these are added; unchanged
    if one is refused. Raises `InvalidRequest`."""
    new = dict(counts)
    for part in parts:
        spec = specs.get(part.kind)
        if spec is None:
            hint = nearest(part.kind, specs) if specs else "; this model takes no tensors"
            raise InvalidRequest(f"{part.field}.name is {shown(part.kind)}{hint}", field=f"{part.field}.name")
        new[spec.name] = new.get(spec.name, 0) + len(items_of(part, spec))
        if new[spec.name] > spec.most:
            raise InvalidRequest(
                f"{part.field} makes {new[spec.name]} items of {spec.name} in this request; at most {spec.most} are "
                "taken",
                field=part.field,
            )
    counts.update(new)


def tensor_part(array: np.ndarray, name: str, field: str, *, written: bool = False) -> MediaPart:
    """A part of an array. `written`: its numbers were written as text, so that any numeric dtype may be meant."""
    info = ArrayInfo(array.dtype.name, array.shape, written=written)
    return MediaPart(name, np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes(), info, field)


def _wrong(part: MediaPart, key: str, value: object, right: str) -> InvalidRequest:
    field = f"{part.field}.{key}" if part.field else key
    said = value if isinstance(value, str) and key == "data" else shown(value)
    return InvalidRequest(f"{field} is {said}; of {part.kind} it must be {right}", field=field)


def _sizes(shape: Iterable[int | str | None]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
