"""Read weights in the formats of compressed-tensors and llm-compressor.

`pack-quantized`: `weight_packed` [outputs, inputs * bits / 32] int32, a stream of bits, each number offset by half of
its range; `weight_shape` [2]; `weight_scale` [outputs, groups]; `weight_zero_point`, packed like the weights along the
outputs [outputs * bits / 32, groups]; `weight_g_idx` [inputs], the group of each input. `int-quantized`,
`float-quantized` and `naive-quantized`: `weight` [outputs, inputs] in int8 or float8, and its scale. Scales are per
group, per output (`channel`), per block, or one for all (`tensor`).

Int8 activations are rounded with a scale per token, whether or not the checkpoint has scales of its own; float8
activations are not rounded, nor keys and values.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import torch

from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.packed.bits import unpacked
from segue.models.shared.checkpoint.packed.weights import (
    Grouped,
    Scaled,
    Tensors,
    Unreadable,
    Weights,
    floats_of,
    groups_of,
    in_order,
    must_be,
    same,
    taken,
    words_of,
)
from segue.models.shared.checkpoint.packed.written import FIELD, one_of

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_STRATEGIES = ("tensor", "channel", "group", "block")


class _Args(msgspec.Struct):
    """The quantisation of the weights or the activations of a group of layers."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: list[int] | None = None


class _Scheme(msgspec.Struct):
    """A group of layers with one quantisation."""

    targets: list[str]
    weights: _Args | None = None
    input_activations: _Args | None = None
    format: str | None = None


class _Written(msgspec.Struct):
    config_groups: dict[str, _Scheme]
    format: str = "dense"
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class Compressed:
    """Raises `ConfigError` for a format outside `FORMATS`, and for sparse or rotated weights."""

    leaves = same(
        *("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
        *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale"),
    )
    marks = frozenset({"weight", "weight_packed"})

    def __init__(self, written: dict[str, Any], path: Path) -> None:
        try:
            self._written = msgspec.convert(written, _Written)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {FIELD}: {error}", field=FIELD) from error
        one_of(path, "format", self._written.format, FORMATS)
        sparse = (self._written.sparsity_config or {}).get("format", "dense")
        one_of(path, "sparsity_config.format", sparse, ("dense",))
        if (self._written.transform_config or {}).get("config_groups"):
            raise ConfigError(
                f"{path}: {FIELD}.transform_config: rotations of activations are not supported", field=FIELD
            )
        for name, scheme in self._written.config_groups.items():
            where = f"config_groups.{name}"
            if scheme.format is not None:
                one_of(path, f"{where}.format", scheme.format, FORMATS)
            if scheme.weights is not None:
                one_of(path, f"{where}.weights.type", scheme.weights.type, ("int", "float"))
                bits = (8,) if scheme.weights.type == "float" else range(2, 9)
                one_of(path, f"{where}.weights.num_bits", scheme.weights.num_bits, bits)
                one_of(path, f"{where}.weights.strategy", _strategy(scheme.weights), _STRATEGIES)

    def read(self, names: tuple[str, ...], tensors: Tensors, shape: tuple[int, int] | None) -> Weights:
        scheme = self._scheme(names)
        if scheme is None or scheme.weights is None:
            leaf = "weight_packed" if "weight_packed" in tensors else "weight"
            raise Unreadable(leaf, f"is quantised, but no target of {FIELD}.config_groups matches its layer")
        if "weight_global_scale" in tensors:
            raise Unreadable("weight_global_scale", "is of an unsupported format (nvfp4)")
        if "weight_packed" in tensors:
            return _packed(scheme.weights, tensors)
        return _plain(scheme, tensors)

    def _scheme(self, names: tuple[str, ...]) -> _Scheme | None:
        """The scheme of a layer, which has several names: by a target equal to one of them, else by a pattern (`re:`)
        that matches the start of one, else by the class."""
        targets = {target: scheme for scheme in self._written.config_groups.values() for target in scheme.targets}
        for name in names:
            if name in targets:
                return targets[name]
        for target in sorted(targets):
            if target.startswith("re:") and any(re.match(target[3:], name) for name in names):
                return targets[target]
        return next((targets[kind] for kind in ("Linear", "Embedding") if kind in targets), None)


def _strategy(args: _Args) -> str:
    if args.strategy is not None:
        return args.strategy
    size = args.group_size
    return "tensor" if size is None else "group" if size > 0 else "channel"


def _packed(args: _Args, tensors: Tensors) -> Grouped:
    words = words_of(tensors, "weight_packed")
    size = taken(tensors, "weight_shape", lambda dtype: not dtype.is_floating_point, "integers", 1).tolist()
    if len(size) != 2:
        raise Unreadable("weight_shape", f"is {size}; it must be outputs and inputs")
    outputs, inputs = size
    bits = args.num_bits
    must_be("weight_packed", words, (outputs, -(-inputs * bits // 32)), f"of {outputs} x {inputs} in {bits} bits")
    half = 2 ** (bits - 1)
    scale, group = _by_group(args, tensors, outputs, inputs)
    zero = torch.full_like(scale, half)
    if "weight_zero_point" in tensors:
        stored = tensors["weight_zero_point"]
        if stored.dtype == torch.int32 and stored.ndim == 2:
            groups = scale.shape[1]
            must_be("weight_zero_point", stored, (-(-outputs * bits // 32), groups), f"of {outputs} x {groups}")
            zero = unpacked(stored.T, bits, outputs).T
        else:
            zero = _zero(tensors, scale, half)
    elif not args.symmetric:
        raise Unreadable("weight_zero_point", "is not in the checkpoint, though its weights are not symmetric")
    return Grouped(unpacked(words, bits, inputs), scale, zero, bits, group)


def _plain(scheme: _Scheme, tensors: Tensors) -> Weights:
    args = scheme.weights
    assert args is not None
    kinds = (torch.int8,) if args.type == "int" else (torch.float8_e4m3fn, torch.float8_e5m2)
    meant = "int8" if args.type == "int" else "float8"
    held = taken(tensors, "weight", lambda dtype: dtype in kinds, f"{meant}, by {FIELD}.config_groups,", 2)
    outputs, inputs = held.shape
    strategy = _strategy(args)
    if args.type == "int" and (strategy in ("group", "block") or not args.symmetric):
        if strategy == "block":
            raise Unreadable("weight", "has integers with scales per block, which are not supported")
        scale, group = _by_group(args, tensors, outputs, inputs)
        zero = torch.full_like(scale, 128) if args.symmetric else _zero(tensors, scale, 128)
        return Grouped((held.int() + 128).to(torch.uint8), scale, zero, 8, group)
    rounded = args.type == "int" and scheme.input_activations is not None
    if strategy == "block":
        if args.block_structure is None or len(args.block_structure) != 2 or min(args.block_structure) < 1:
            raise Unreadable("weight", f"has scales by block; block_structure is {args.block_structure}")
        block = args.block_structure[0], args.block_structure[1]
        scale = floats_of(tensors, "weight_scale")
        must_be("weight_scale", scale, (-(-outputs // block[0]), -(-inputs // block[1])), f"by blocks of {block}")
        return Scaled(held, scale, block, rounded=False)
    if strategy == "group":
        scale, _ = _by_group(args, tensors, outputs, inputs)
        return Scaled(held, scale, (1, args.group_size or inputs), rounded=False)
    scale = _flat(tensors, "weight_scale", outputs, strategy)
    return Scaled(held, scale, (outputs if len(scale) == 1 else 1, inputs), rounded)


def _by_group(args: _Args, tensors: Tensors, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale [outputs, groups], and the group of each input [inputs]."""
    strategy = _strategy(args)
    if strategy != "group":
        scale = _flat(tensors, "weight_scale", outputs, strategy).expand(outputs, 1)
        return scale, in_order(inputs, inputs, scale.device)
    size = args.group_size
    if size is None or size < 1:
        raise Unreadable("weight_scale", f"is of groups; {FIELD} says that they have {size} inputs")
    scale = floats_of(tensors, "weight_scale")
    must_be("weight_scale", scale, (outputs, -(-inputs // size)), f"of {outputs} x {inputs} in groups of {size}")
    order = tensors.get("weight_g_idx")
    if order is None or (order.numel() and bool((order == -1).all())):  # some files write an unused order so
        return scale, in_order(inputs, size, scale.device)
    return scale, groups_of(tensors, "weight_g_idx", inputs, scale.shape[1])


def _flat(tensors: Tensors, leaf: str, outputs: int, strategy: str) -> torch.Tensor:
    """A scale per output, or one for all: [outputs or 1, 1]."""
    if leaf not in tensors:
        raise Unreadable(leaf, "is not in the checkpoint")
    scale = tensors[leaf]
    count = outputs if strategy == "channel" else 1
    if scale.numel() != count or not scale.dtype.is_floating_point or scale.dtype.itemsize == 1:
        kind = str(scale.dtype).removeprefix("torch.")
        raise Unreadable(leaf, f"is {kind} {list(scale.shape)}; by {strategy} there must be {count} floats")
    return scale.reshape(count, 1)


def _zero(tensors: Tensors, scale: torch.Tensor, half: int) -> torch.Tensor:
    """[outputs, groups]: zero points of numbers that are offset by `half`."""
    stored = _stored_zero(tensors)
    if stored.numel() not in (1, scale.numel()):
        raise Unreadable("weight_zero_point", f"is {list(stored.shape)}; its scale is {list(scale.shape)}")
    whole = stored.reshape(1, 1) if stored.numel() == 1 else stored.reshape(scale.shape)
    return (whole.float() + half).expand(scale.shape)


def _stored_zero(tensors: Tensors) -> torch.Tensor:
    """Zero points that are not packed. Raises `Unreadable`."""
    leaf = "weight_zero_point"
    if leaf not in tensors:
        raise Unreadable(leaf, "is not in the checkpoint, though its weights are not symmetric")
    if tensors[leaf].dtype.is_floating_point:
        raise Unreadable(leaf, f"is {str(tensors[leaf].dtype).removeprefix('torch.')}; it must be integers")
    return tensors[leaf]
