"""What the connector tests send, and how they compare it: bit by bit."""

import math

import torch
from torch import Tensor

from segue.connectors.payload import DTYPES as BY_NAME

DTYPES = sorted(BY_NAME)


def bits(tensor: Tensor) -> bytes:
    """The tensor's elements in order, as bytes."""
    return bytes(tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def same(left: object, right: object) -> bool:
    """Equal in type, structure, dtype, shape and bits (nan equals nan)."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return left == right


def raw_tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor whose bytes count up from 1, whatever they mean in `dtype` (0 and 1 for bool)."""
    kind = BY_NAME[dtype]
    data = torch.arange(1, 1 + math.prod(shape) * kind.itemsize, dtype=torch.int64)
    return (data % (2 if dtype == "bool" else 251)).to(torch.uint8).view(kind).view(shape)
