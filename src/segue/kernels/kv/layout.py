"""Arranges the layers of a decoder in groups that share block tables, and assigns them the tensors of the store.

Layers with the same attention window and directions form a *group*: a sequence has one block table per group, and a
group of windowed layers frees the blocks that lie entirely before its window. All groups take blocks from one pool of
equal blocks: every group has (nearly) as many layers as the others, and the j-th layers of all groups share the j-th
tensors of the store, where a block belongs to one group at a time. So memory that one group does not need is available
to the others, whatever the lengths of the sequences. (The idea is that of vLLM's hybrid KV cache manager.)

    layers       0 window   1 full   2 window   3 full
    group          1          0         1         0
    tensor         0          0         1         1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from segue.kernels.attention.interface import AttentionWindow, Chunked

_MOST_PADDING = 1 / 8
"""Share of a block's memory that may stay unused because groups differ in size."""


class LayerShape(NamedTuple):
    """K/V shape of one layer."""

    kv_heads: int
    head_dim: int
    """Width of the keys."""
    value_dim: int


NOTHING = LayerShape(0, 0, 0)
"""Shape of a layer without attention, which is in no group."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layers arranged in groups. Group 0 frees no blocks if any layer has full attention.

    A decoder without attention has one group that sees one token: its sequences are counted in zero-size blocks.
    """

    shapes: tuple[LayerShape, ...]
    """[layers]"""
    windows: tuple[AttentionWindow, ...]
    """[groups] Attention window of a group's layers."""
    ahead: tuple[bool, ...]
    """[groups] Whether its layers use bidirectional spans (`Part.bidirectional`)."""
    group_of: tuple[int, ...]
    """[layers]"""
    tensor_of: tuple[int, ...]
    """[layers] Index of its tensors in the store; different for the layers of a group."""

    @property
    def tensors(self) -> int:
        held = [tensor for tensor, shape in zip(self.tensor_of, self.shapes, strict=True) if shape != NOTHING]
        return max(held) + 1 if held else 0

    @property
    def groups(self) -> int:
        return len(self.windows)

    def widths(self, tensor: int) -> tuple[int, int]:
        """(width of a key, width of a value) of a slot in this tensor: those of its widest layer."""
        shapes = [shape for shape, place in zip(self.shapes, self.tensor_of, strict=True) if place == tensor]
        keys = max(shape.kv_heads * shape.head_dim for shape in shapes)
        values = max(shape.kv_heads * shape.value_dim for shape in shapes)
        return keys, values

    @property
    def token_width(self) -> int:
        """Elements that a block holds per token, over all tensors."""
        return sum(sum(self.widths(tensor)) for tensor in range(self.tensors))


def uniform(layers: int, kv_heads: int, head_dim: int) -> KVLayout:
    """A layout of identical layers with full attention."""
    return lay_out([LayerShape(kv_heads, head_dim, head_dim)] * layers, [None] * layers)


def lay_out(
    shapes: Sequence[LayerShape], windows: Sequence[AttentionWindow], ahead: frozenset[int] = frozenset()
) -> KVLayout:
    """The layout with the fewest groups that leaves at most an eighth of a block unused; full attention comes first.
    `ahead`: the layers that use bidirectional spans."""
    classes: dict[tuple[AttentionWindow, bool], list[int]] = {}
    for layer, (shape, window) in enumerate(zip(shapes, windows, strict=True)):
        if shape != NOTHING:
            classes.setdefault((window, layer in ahead), []).append(layer)
    if not classes:
        return KVLayout(tuple(shapes), (1,), (False,), (0,) * len(shapes), (0,) * len(shapes))
    ordered = sorted(classes.items(), key=lambda entry: _place(entry[0]))
    size = _group_size([len(layers) for _, layers in ordered])
    group_of, tensor_of = [0] * len(shapes), [0] * len(shapes)
    of_groups: list[tuple[AttentionWindow, bool]] = []
    for kind, layers in ordered:
        for place, layer in enumerate(layers):
            group_of[layer] = len(of_groups) + place // size
            tensor_of[layer] = place % size
        of_groups += [kind] * -(-len(layers) // size)
    backs, ahead_of = zip(*of_groups, strict=True)
    return KVLayout(tuple(shapes), backs, ahead_of, tuple(group_of), tuple(tensor_of))


def _place(kind: tuple[AttentionWindow, bool]) -> tuple[int, int, bool]:
    """Sort key: full attention, windows, chunks."""
    back, ahead = kind
    if isinstance(back, Chunked):
        return 2, back.size, ahead
    return (0, 0, ahead) if back is None else (1, back, ahead)


def _group_size(counts: Sequence[int]) -> int:
    """Layers per group that give the fewest groups without leaving much memory unused. One layer per group leaves
    nothing unused."""
    layers = sum(counts)
    best, fewest = 1, layers
    for size in range(1, max(counts) + 1):
        groups = sum(-(-count // size) for count in counts)
        if groups < fewest and size * groups - layers <= _MOST_PADDING * size * groups:
            best, fewest = size, groups
    return best
