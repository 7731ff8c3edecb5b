"""The block pool: tracks which sequences own each KV block, and which full blocks can be shared.

If layers have different attention windows (`segue.kernels.kv.layout`), all groups of layers take blocks from one pool.

A block is in exactly one of three places:

    free ──allocate──▶ used (references ≥ 1) ──release──▶ free            if it has no hash
     ▲                  ▲                    ╰─release──▶ cached (LRU)    if it was published
     ╰────evicted by allocate──── cached ──share──╯

A sequence owns its tokens as intervals of its block table: with `n` full blocks published, `[0, n * block_size)` may
be shared with others and is never written again. Only whole blocks of computed tokens are published. The rest belongs
to the sequence alone, unless it was forked: then its copies hold the same blocks, including the last one, which may not
be full. A sequence copies a block that others hold before it writes to it (copy on write: Kwon et al., 2023, §4.4).

`FreeRuns` keeps free blocks as runs of consecutive numbers, so that a sequence's blocks are consecutive if possible:
attention reads consecutive blocks in place, but must first copy scattered ones together. A sequence grows into the
block after its last one while that is free; a new one starts in the middle of the longest free run, so that both the
sequence before it and the new one have room to grow."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from segue.kernels.attention.interface import AttentionWindow, first_seen


class FreeRuns:
    """A set of block numbers; initially all from 0 to `total` - 1."""

    def __init__(self, total: int) -> None:
        self._starts = [0] if total else []
        """Sorted."""
        self._lengths = {0: total} if total else {}
        """Length by start of the run."""
        self._count = total

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start in self._starts:
            yield from range(start, start + self._lengths[start])

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks: those that follow `after`, then the rest in as few runs as possible.

        The caller has checked that the set has enough.
        """
        taken: list[int] = []
        while len(taken) < count:
            wanted = count - len(taken)
            start = -1 if after is None else after + 1
            if start not in self._lengths:
                start = self._place(wanted)
            size = min(wanted, self._lengths[start])
            self._cut(start, size)
            taken += range(start, start + size)
            after = taken[-1]
        return taken

    def give(self, block: int) -> None:
        """Return a block that is not in the set."""
        index = bisect_left(self._starts, block)
        self._count += 1
        length = 1
        if index < len(self._starts) and self._starts[index] == block + 1:
            del self._starts[index]
            length += self._lengths.pop(block + 1)
        before = self._starts[index - 1] if index else -1
        if index and before + self._lengths[before] == block:
            self._lengths[before] += length
        else:
            self._starts.insert(index, block)
            self._lengths[block] = length

    def _place(self, wanted: int) -> int:
        """Start of a run for a new sequence, after splitting the longest run there if necessary."""
        start, length = max(self._lengths.items(), key=lambda run: (run[1], -run[0]))
        # no sequence before block 0 could need room to grow
        skipped = 0 if start == 0 else max(0, min(length // 2, length - wanted))
        if skipped:
            self._lengths[start] = skipped
            self._lengths[start + skipped] = length - skipped
            self._starts.insert(bisect_left(self._starts, start) + 1, start + skipped)
        return start + skipped

    def _cut(self, start: int, size: int) -> None:
        """Remove the first `size` blocks of the run at `start`."""
        self._count -= size
        index = bisect_left(self._starts, start)
        rest = self._lengths.pop(start) - size
        if rest:
            self._starts[index] = start + size
            self._lengths[start + size] = rest
        else:
            del self._starts[index]


ROOT = b""
"""Parent hash of the first block."""


def block_hash(parent: bytes, identity: bytes) -> bytes:
    """Hash of a full block: covers everything before it (`parent`) and the identity of its own tokens."""
    return hashlib.blake2b(identity, key=parent, digest_size=16).digest()


def chain_root(salt: str | None) -> bytes:
    """Parent hash of a sequence's first block: only requests with the same salt share blocks."""
    return ROOT if salt is None else block_hash(ROOT, b"s" + salt.encode())


def group_key(key: bytes, group: int) -> bytes:
    """Key that publishes a full block for one group of layers: each group has its own K and V of it."""
    return key if group == 0 else key + group.to_bytes(2, "big")


def first_visible(window: AttentionWindow, computed: int, block_size: int) -> int:
    """Index of the first block that a query at position `computed` or later can see."""
    return first_seen(window, computed) // block_size


def visible(windows: Sequence[AttentionWindow], length: int, block_size: int) -> list[int]:
    """Per group: how many of `length` full blocks the next token sees."""
    return [length - first_visible(window, length * block_size, block_size) for window in windows]


def common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Number of leading blocks that two hash chains share: after the first difference, all hashes differ."""
    places = range(min(len(one), len(other)))
    return bisect_left(places, True, key=lambda place: one[place] != other[place])


def find_hit(
    pool: BlockPool, hashes: Sequence[bytes], windows: Sequence[AttentionWindow], block_size: int
) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """(blocks in the longest usable prefix of a hash chain, per group: those of them that the next token sees).

    A full-attention group needs all of them, a windowed one those that cover its last `window - 1` tokens, a chunked
    one those of the last chunk; so a prefix can be usable although a shorter one is not.
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
        # a usable prefix ends before any missing block
        lacking = next((index for group, index in needed if not pool.has(group_key(hashes[index], group))), None)
    for group, window in windowed:
        seen = hashes[first_visible(window, length * block_size, block_size) : length]
        chains[group] = pool.find(group_key(key, group) for key in seen)
    return length, tuple(tuple(chains[group][:length]) for group in range(len(windows)))


class BlockPool:
    """Counts references to blocks and keeps published ones until their memory is needed."""

    def __init__(self, num_blocks: int) -> None:
        self.total = num_blocks
        self.references = [0] * num_blocks
        self._free = FreeRuns(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # published, unreferenced; least recently used first
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can return: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` blocks with one reference each, starting with the one after `after` if it is free.

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
        """Whether a block with this key is published."""
        return key in self._by_hash

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which are published or in use."""
        for block in blocks:
            if self.references[block] == 0:
                del self._cached[block]
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each; the end of a chain is evicted before its start."""
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} released twice"
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.give(block)

    def private(self, blocks: Iterable[int]) -> list[int]:
        """From blocks held by some sequences (each listed once per holder), return those that no other sequence holds
        or can find."""
        held = Counter(blocks)
        return [block for block in held if self.references[block] == held[block] and block not in self._hash_of]

    def publish(self, block: int, key: bytes) -> None:
        """Publish a full block for others to find. If an equal one is published already, that one stays."""
        if key not in self._by_hash and block not in self._hash_of:
            self._by_hash[key] = block
            self._hash_of[block] = key

    def audit_idle(self) -> None:
        """Check that no block is held, in constant time, unlike `audit` (a pool can have 100,000 blocks)."""
        assert len(self._free) + len(self._cached) == self.total, "blocks are lost"

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Check all state against the block tables of every sequence; `AssertionError` names the inconsistency."""
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
