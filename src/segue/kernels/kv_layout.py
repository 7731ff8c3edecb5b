"""Which layers of a decoder share block tables, and which tensors of the store hold them.

Layers that look back equally far, and ahead alike, form a *group*: a sequence has one block table per group, and a
group of windowed layers gives back the blocks that lie wholly behind its window. All groups take their blocks from one
pool of equal blocks: every group has (nearly) as many layers as the others, and the j-th layers of all groups share the
j-th tensors of the store, where a block belongs to one group at a time. So room that one group does not need is there
for the others, whatever the lengths of the sequences. (The idea is that of vLLM's hybrid KV cache manager.)

    layers       0 window   1 full   2 window   3 full
    group          1          0         1         0
    tensor         0          0         1         1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from segue.kernels.look_back import Chunked, LookBack

_MOST_PADDING = 1 / 8
"""Share of a block's memory that may lie idle because groups are not equally large."""


class LayerShape(NamedTuple):
    """What one layer keeps of a token."""

    kv_heads: int
    head_dim: int
    """Of the keys."""
    value_dim: int


NOTHING = LayerShape(0, 0, 0)
"""Of a layer without attention: it is in no group."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layers laid into groups. Group 0 never forgets where a layer with full attention exists.

    A decoder without attention has one group that sees one token: its sequences are counted in blocks of no memory.
    """

    shapes: tuple[LayerShape, ...]
    """[layers]"""
    windows: tuple[LookBack, ...]
    """[groups] How far the layers of a group look back."""
    ahead: tuple[bool, ...]
    """[groups] Whether tokens that see each other in both directions (`Part.mutual`) do so in its layers."""
    group_of: tuple[int, ...]
    """[layers]"""
    tensor_of: tuple[int, ...]
    """[layers] Which tensors of the store; different for the layers of a group."""

    @property
    def tensors(self) -> int:
        held = [tensor for tensor, shape in zip(self.tensor_of, self.shapes, strict=True) if shape != NOTHING]
        return max(held) + 1 if held else 0

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


def lay_out(shapes: Sequence[LayerShape], windows: Sequence[LookBack], ahead: frozenset[int] = frozenset()) -> KVLayout:
    """The layout with the fewest groups that leaves at most an eighth of a block idle; full attention comes first.
    `ahead`: the layers in which tokens may see each other in both directions."""
    classes: dict[tuple[LookBack, bool], list[int]] = {}
    for layer, (shape, window) in enumerate(zip(shapes, windows, strict=True)):
        if shape != NOTHING:
            classes.setdefault((window, layer in ahead), []).append(layer)
    if not classes:
        return KVLayout(tuple(shapes), (1,), (False,), (0,) * len(shapes), (0,) * len(shapes))
    ordered = sorted(classes.items(), key=lambda entry: _place(entry[0]))
    size = _group_size([len(layers) for _, layers in ordered])
    group_of, tensor_of = [0] * len(shapes), [0] * len(shapes)
    of_groups: list[tuple[LookBack, bool]] = []
    for kind, layers in ordered:
        for place, layer in enumerate(layers):
            group_of[layer] = len(of_groups) + place // size
            tensor_of[layer] = place % size
        of_groups += [kind] * -(-len(layers) // size)
    backs, ahead_of = zip(*of_groups, strict=True)
    return KVLayout(tuple(shapes), backs, ahead_of, tuple(group_of), tuple(tensor_of))


def _place(kind: tuple[LookBack, bool]) -> tuple[int, int, bool]:
    """Full attention, windows, chunks."""
    back, ahead = kind
    if isinstance(back, Chunked):
        return 2, back.size, ahead
    return (0, 0, ahead) if back is None else (1, back, ahead)


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
