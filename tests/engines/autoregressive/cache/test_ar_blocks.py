"""The block pool under any order of use: its state always balances, and nothing shared is given away."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from segue.engines.autoregressive.cache.blocks import ROOT, BlockPool, block_hash, find_hit, first_visible, group_key
from segue.kernels.attention.interface import Chunked


def chain(text: str) -> list[bytes]:
    hashes = [ROOT]
    for letter in text:
        hashes.append(block_hash(hashes[-1], letter.encode()))
    return hashes[1:]


def test_hash_depends_on_everything_before():
    assert chain("abc")[2] == chain("abc")[2]
    assert chain("abc")[2] != chain("xbc")[2]
    assert chain("ab")[1] != chain("ba")[1]


def test_least_recently_used_goes_first_and_ends_of_chains_before_beginnings():
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for blocks, text in ((old, "ab"), (new, "xy")):
        for block, key in zip(blocks, chain(text), strict=True):
            pool.publish(block, key)
    pool.release(old)
    pool.release(new)
    pool.allocate(1)
    assert len(pool.find(chain("ab"))) == 1
    pool.share(pool.find(chain("ab")))  # in use again: the next victim is of the other chain
    pool.allocate(1)
    assert len(pool.find(chain("ab"))) == 1
    assert len(pool.find(chain("xy"))) == 1


def test_release_of_what_is_not_held():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


@pytest.mark.parametrize("damage", ["leak", "steal", "count"])
def test_audit_sees_damage(damage):
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.audit([table])
    if damage == "leak":
        tables = [table[:1]]
    elif damage == "steal":
        tables = [[*table, 0]]
    else:
        pool.references[table[0]] += 1
        tables = [table]
    with pytest.raises(AssertionError):
        pool.audit(tables)


class Pool(RuleBasedStateMachine):
    """Sequences over two letters: many share prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: dict[int, list[int]] = {}
        self.content: dict[int, str] = {}
        """What each block was last written with: the whole text up to it."""
        self.serial = 0

    @rule(text=st.text("ab", min_size=1, max_size=4))
    def begin(self, text: str) -> None:
        hits = self.pool.find(chain(text))
        for place, block in enumerate(hits):
            assert self.content[block] == text[: place + 1], "a hit holds something else"
        fresh = len(text) - len(hits)
        unused = sum(self.pool.references[block] == 0 for block in hits)
        if fresh + unused > self.pool.available:
            return
        self.pool.share(hits)
        table = hits + self.pool.allocate(fresh)
        for place in range(len(hits), len(text)):
            self.content[table[place]] = text[: place + 1]
            self.pool.publish(table[place], chain(text)[place])
        self.tables[self.serial] = table
        self.serial += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.release(self.tables.pop(key))

    @precondition(lambda self: self.pool.available)
    @rule()
    def grow(self) -> None:
        [block] = self.pool.allocate(1)
        self.content[block] = "private"
        self.tables[self.serial] = [block]
        self.serial += 1

    @invariant()
    def books_balance(self) -> None:
        self.pool.audit(self.tables.values())


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase


@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2))),
    st.lists(st.sampled_from([None, 1, 2, 5, 9, 100, Chunked(4), Chunked(8), Chunked(20)]), min_size=1, max_size=3),
)
def test_a_hit_is_the_longest_prefix_whose_visible_blocks_are_there(count, holes, windows):
    """Against trying every length."""
    size, pool = 4, BlockPool(30)
    hashes = [bytes([index]) for index in range(count)]
    blocks = {}
    for group in range(len(windows)):
        for index in range(count):
            if (index, group) not in holes:
                [blocks[index, group]] = pool.allocate(1)
                pool.publish(blocks[index, group], group_key(hashes[index], group))

    def oldest(window, position):
        if isinstance(window, Chunked):
            return position - position % window.size
        return 0 if window is None else position + 1 - window

    def seen(length):
        """(block, group) that the token after so many blocks sees."""
        return [
            (index, group)
            for group, window in enumerate(windows)
            for index in range(length)
            if (index + 1) * size > oldest(window, length * size)
        ]

    longest = max(length for length in range(count + 1) if all(entry in blocks for entry in seen(length)))
    length, hit = find_hit(pool, hashes, windows, size)
    assert length == longest
    for group in range(len(windows)):
        assert list(hit[group]) == [blocks[entry] for entry in seen(length) if entry[1] == group]


@pytest.mark.parametrize(("computed", "first"), [(0, 0), (7, 0), (8, 0), (10, 0), (11, 1), (14, 1), (15, 2)])
def test_what_a_window_of_eight_still_sees(computed, first):
    """Blocks of 4: the query at position 11 sees keys 4 to 11."""
    assert first_visible(8, computed, 4) == first
    assert first_visible(None, computed, 4) == 0
