"""Which layers of a decoder share block tables, and which tensors of the store hold them.

Layers that look back equally far form a *group*: a sequence has one block table per group, and a group of windowed
layers gives back the blocks that lie wholly behind its window. All groups take their blocks from one pool of equal
blocks: every group has (nearly) as many layers as the others, and the j-th layers of all groups share the j-th tensors
of the store, where a block belongs to one group at a time. So room that one group does not need is there for the
others, whatever the lengths of the sequences. (The idea is that of vLLM's hybrid KV cache manager.)

    layers       0 window   1 full   2 window   3 full
    group          1          0         1         0
    tensor         0          0         1         1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MOST_PADDING = 1 / 8
"""Share of a block's memory that may lie idle because groups are not equally large."""


class LayerShape(NamedTuple):
    """What one layer keeps of a token."""

    kv_heads: int
    head_dim: int
    """Of the keys."""
    value_dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layers laid into groups. Group 0 never forgets where a layer with full attention exists."""

    shapes: tuple[LayerShape, ...]
    """[layers]"""
    windows: tuple[int | None, ...]
    """[groups] How many tokens a query sees, itself included; None: all before it."""
    group_of: tuple[int, ...]
    """[layers]"""
    tensor_of: tuple[int, ...]
    """[layers] Which tensors of the store; different for the layers of a group."""

    @property
    def tensors(self) -> int:
        return max(self.tensor_of) + 1

    @property
    def groups(self) -> int:
        return len(self.windows)

    def widths(self, tensor: int) -> tuple[int, int]:
        """(width of a key, width of a value) of a slot in this tensor: those of the widest layer in it."""
        shapes = [shape for shape, place in zip(self.shapes, self.tensor_of, strict=True) if place == tensor]
        keys = max(shape.kv_heads * shape.head_dim for shape in shapes)
        values = max(shape.kv_heads * shape.value_dim for shape in shapes)
        return keys, values

    @property
    def token_width(self) -> int:
        """Numbers that a block holds per token, over all tensors."""
        return sum(sum(self.widths(tensor)) for tensor in range(self.tensors))


def uniform(layers: int, kv_heads: int, head_dim: int) -> KVLayout:
    """All layers alike, with full attention."""
    return lay_out([LayerShape(kv_heads, head_dim, head_dim)] * layers, [None] * layers)


def lay_out(shapes: Sequence[LayerShape], windows: Sequence[int | None]) -> KVLayout:
    """The layout with the fewest groups that leaves at most an eighth of a block idle; full attention comes first."""
    classes: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        classes.setdefault(window, []).append(layer)
    ordered = sorted(classes.items(), key=lambda entry: (entry[0] is not None, entry[0] or 0))
    size = _group_size([len(layers) for _, layers in ordered])
    group_of, tensor_of = [0] * len(shapes), [0] * len(shapes)
    of_groups: list[int | None] = []
    for window, layers in ordered:
        for place, layer in enumerate(layers):
            group_of[layer] = len(of_groups) + place // size
            tensor_of[layer] = place % size
        of_groups += [window] * -(-len(layers) // size)
    return KVLayout(tuple(shapes), tuple(of_groups), tuple(group_of), tuple(tensor_of))


def _group_size(counts: Sequence[int]) -> int:
    """Layers per group: as many as make the fewest groups, without leaving much idle. One layer per group leaves
    nothing idle."""
    layers = sum(counts)
    best, fewest = 1, layers
    for size in range(1, max(counts) + 1):
        groups = sum(-(-count // size) for count in counts)
        if groups < fewest and size * groups - layers <= _MOST_PADDING * size * groups:
            best, fewest = size, groups
    return best
