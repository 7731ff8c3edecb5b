"""The block pool: who owns which KV block, and which full blocks can be shared.

Where layers look back differently far (`segue.kernels.kv_layout`), all groups of layers take their blocks from here.

A block is in exactly one of three places:

    free ──allocate──▶ used (references ≥ 1) ──release──▶ free            where it has no hash
     ▲                  ▲                    ╰─release──▶ cached (LRU)    where it was published
     ╰────evicted by allocate──── cached ──share──╯

A sequence owns its tokens as intervals of its block table: with `n` full blocks published, `[0, n * block_size)` may
be shared with others and is never written again. Only whole blocks that hold computed tokens are published. The rest is
its own, but for a sequence that was forked: its copies hold the same blocks, the last one included, which may not be
full. Who writes to a block that others hold takes a copy of it first (copy on write: Kwon et al., 2023, §4.4).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from segue.engines.autoregressive.free_runs import FreeRuns
from segue.kernels.look_back import LookBack, first_seen

ROOT = b""
"""Parent hash of the first block."""


def block_hash(parent: bytes, identity: bytes) -> bytes:
    """Hash of a full block: everything before it (`parent`), and what its own tokens are."""
    return hashlib.blake2b(identity, key=parent, digest_size=16).digest()


def chain_root(salt: str | None) -> bytes:
    """Parent hash of a sequence's first block: blocks are shared only among requests of one salt."""
    return ROOT if salt is None else block_hash(ROOT, b"s" + salt.encode())


def group_key(key: bytes, group: int) -> bytes:
    """Under which a full block of this hash is published by a group of layers: each has its own K and V of it."""
    return key if group == 0 else key + group.to_bytes(2, "big")


def first_visible(window: LookBack, computed: int, block_size: int) -> int:
    """The first block that a query at position `computed`, or a later one, can see."""
    return first_seen(window, computed) // block_size


def visible(windows: Sequence[LookBack], length: int, block_size: int) -> list[int]:
    """Per group: how many of `length` full blocks the token after them sees."""
    return [length - first_visible(window, length * block_size, block_size) for window in windows]


def common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many blocks two hash chains have in common: from the first difference on, all differ."""
    places = range(min(len(one), len(other)))
    return bisect_left(places, True, key=lambda place: one[place] != other[place])


def find_hit(
    pool: BlockPool, hashes: Sequence[bytes], windows: Sequence[LookBack], block_size: int
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """(blocks in the longest usable prefix of a hash chain, per group: those of them that the next token sees).

    A group with full attention needs all of them; a windowed one those that cover its last `window - 1` tokens, one
    that attends in chunks those of the last chunk, so a prefix can be usable although a shorter one is not.
    """
    length = len(hashes)
    chains: dict[int, list[int]] = {}
    for group, window in enumerate(windows):
        if window is None:
            chains[group] = pool.find(group_key(key, group) for key in hashes[:length])
            length = len(chains[group])
    windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
    lacking: int | None = length
    while lacking is not None:
        length = lacking
        needed = (
            (group, index)
            for group, window in windowed
            for index in range(length - 1, first_visible(window, length * block_size, block_size) - 1, -1)
        )
        # a prefix that is usable ends before a block that is not there
        lacking = next((index for group, index in needed if not pool.has(group_key(hashes[index], group))), None)
    for group, window in windowed:
        seen = hashes[first_visible(window, length * block_size, block_size) : length]
        chains[group] = pool.find(group_key(key, group) for key in seen)
    return length, tuple(tuple(chains[group][:length]) for group in range(len(windows)))


class BlockPool:
    """Counts references to blocks and remembers published ones until their room is needed."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self.references = [0] * num_blocks
        self._free = FreeRuns(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # published, unreferenced; least recently used first
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks with one reference each, the one that follows `after` first where it is free.

        The caller has checked `available`.
        """
        assert count <= self.available, f"{count} blocks wanted, {self.available} available"
        while len(self._free) < count:
            block, _ = self._cached.popitem(last=False)
            del self._by_hash[self._hash_of.pop(block)]
            self._free.give(block)
        blocks = self._free.take(count, after)
        for block in blocks:
            self.references[block] = 1
        return blocks

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest published prefix of a hash chain."""
        found = []
        for key in hashes:
            block = self._by_hash.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def has(self, key: bytes) -> bool:
        """Whether such a block is published."""
        return key in self._by_hash

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these blocks, which are published or held by somebody."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each; the end of a chain is evicted before its beginning."""
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} released twice"
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.give(block)

    def private(self, blocks: Iterable[int]) -> list[int]:
        """Of the blocks that some sequences hold (each as often as they hold it): those that no other sequence has or
        can find."""
        held = Counter(blocks)
        return [block for block in held if self.references[block] == held[block] and block not in self._hash_of]

    def publish(self, block: int, key: bytes) -> None:
        """Let others find this full block. Where an equal one is published already, that one stays."""
        if key not in self._by_hash and block not in self._hash_of:
            self._by_hash[key] = block
            self._hash_of[block] = key

    def audit_idle(self) -> None:
        """Nobody holds a block: what `audit` would find, in constant time (a pool can have 100,000 blocks)."""
        assert len(self._free) + len(self._cached) == self.total, "blocks are lost"

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Check all books against the block tables of every sequence; `AssertionError` names what is off."""
        owned = Counter(block for table in tables for block in table)
        for block, references in enumerate(self.references):
            assert references == owned[block], f"block {block}: {references} references, {owned[block]} owners"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks both free and cached: {sorted(free & cached)}"
        unused = {block for block, references in enumerate(self.references) if references == 0}
        assert free | cached == unused, f"lost or stolen blocks: {sorted((free | cached) ^ unused)}"
        assert len(free) + len(cached) + len(owned) == self.total, "free + cached + used is not the total"
        assert {block: key for key, block in self._by_hash.items()} == self._hash_of, "hash tables disagree"
        assert cached <= self._hash_of.keys(), "a cached block has no hash"
        assert not free & self._hash_of.keys(), "a free block has a hash"
