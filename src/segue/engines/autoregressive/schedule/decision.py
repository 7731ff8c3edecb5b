"""Types of the scheduler: sequences as it sees them, size limits, what a step computes, and the `Ledger` of free blocks
that is kept while a step is decided."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from segue.engines.autoregressive.cache.blocks import BlockPool
from segue.engines.autoregressive.schedule.bidirectional import longest_of
from segue.engines.autoregressive.schedule.policies import Rank
from segue.kernels.attention.interface import AttentionWindow, Chunked


@dataclass(slots=True)
class Table:
    """Block table of a sequence in one group of layers."""

    first: int = 0
    """Blocks before this one lie entirely before the group's attention window and were freed."""
    blocks: list[int] = field(default_factory=list)
    """`blocks[i]` holds tokens [(first + i) * block_size, (first + i + 1) * block_size)."""


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """The scheduler's view of a sequence. The engine owns `length`, `ready`, `drafts`, `hashes`, `fresh`,
    `bidirectional`, `entire`, `paused`, `open`, `lent` and `appended`; the scheduler owns `computed`, `dispatched`,
    `tables`, `slot`, `wanted`, `held`, `drafted`, `newest`, `forked` and `running`. `parked` and `since` are set by the
    scheduler and reset by the engine when more input arrives."""

    key: str
    rank: Rank
    """(priority, arrival, serial): lower runs first (`policies.rank`)."""
    length: int = 0
    """Known tokens: prompt and generated. 0: the prompt has not arrived."""
    ready: int = 0
    """Tokens whose inputs are available: all known ones, except those whose conditioning has not arrived."""
    drafts: int = 0
    """Draft tokens after the known ones, to be verified in the step that computes the last known one."""
    computed: int = 0
    """Tokens in the KV cache."""
    dispatched: int = 0
    """A step in flight computes tokens up to here; 0: it is in no such step."""
    tables: list[Table] = field(default_factory=list)
    """One per group of layers, all ending at the same block; none while it waits."""
    hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the full blocks that may be shared."""
    fresh: bool = False
    """Take no blocks from the prefix cache: every prompt row must be computed."""
    bidirectional: tuple[tuple[int, int], ...] = ()
    """Spans of its prompt that must be computed whole (`bidirectional`)."""
    entire: bool = False
    """Its state can be continued by only one token at a time (`StateLayout.continues`): each admission computes all
    known tokens in one run, and each later step one token."""
    slot: int | None = None
    """Slot of its state while it runs, for a decoder with state."""
    wanted: int = 0
    """Block boundary up to which it shares a prefix with others: its state there is kept (`snapshots`). 0: none."""
    held: dict[int, int] = field(default_factory=dict)
    """Boundary → slot to which a step in flight writes its state at that boundary."""
    drafted: tuple[int, int] | None = None
    """Range of the drafts in a step in flight, for a sequence with a state."""
    newest: bytes | None = None
    """Hash of the last state kept while it generated; the next such state replaces it."""
    paused: bool = False
    open: bool = False
    """It waits for more input as soon as the `ready` tokens are computed (`hold`)."""
    lent: bool = False
    """It lends its blocks to another engine (`contexts`, which makes sure that all lent blocks fit into the pool): it
    is admitted first, and never preempted."""
    parked: bool = False
    """It was preempted while tokens after `ready` waited for input: it is not admitted before more input arrives."""
    since: float | None = None
    """Since when it holds."""
    appended: int = 0
    """Known tokens that were appended to its input and not yet charged to its tenant."""
    running: bool = False
    tenant: str = ""
    share: float = 1.0
    """Its tenant's share: charges are divided by it."""
    charged: int = 0
    """Tokens its tenant was charged for (`policies.Accounts`)."""
    width: int = 1
    """How many sequences it occupies in a step after its prompt is computed and it has been forked."""
    forked: bool = False
    """It may share partly filled blocks with other sequences."""
    beam_group: list[ScheduledSequence] = field(default_factory=list, repr=False)
    """The beams of its request, including itself; empty if it has none."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Spans that must be computed whole."""
        if self.entire:
            return () if self.computed else ((0, self.ready),)
        return self.bidirectional

    @property
    def at_once(self) -> int:
        """The most tokens that it can compute in a step while running."""
        return 1 if self.entire and self.computed else self.ready - self.computed

    @property
    def runnable(self) -> bool:
        return not self.paused and self.ready > self.computed and (self.running or not self.parked)

    @property
    def holding(self) -> bool:
        """Whether it holds its blocks only for input that may come."""
        return self.open and self.running and self.ready <= self.computed

    @property
    def decoding(self) -> bool:
        """Whether only its newest token is left to compute."""
        return self.running and self.ready - self.computed == 1

    @property
    def end(self) -> int:
        """Index of the block at which its tables end."""
        return self.tables[0].first + len(self.tables[0].blocks) if self.tables else 0

    @property
    def blocks(self) -> list[int]:
        """All its blocks, over all groups."""
        if len(self.tables) == 1:
            return self.tables[0].blocks
        return [block for table in self.tables for block in table.blocks]

    @property
    def unit(self) -> list[ScheduledSequence]:
        """Sequences that run in the same step or not at all: a beam group whose last tokens are ready. Before that,
        after a preemption, each beam catches up separately."""
        return self.beam_group if self.beam_group and self.ready == self.length else [self]

    @property
    def together(self) -> list[ScheduledSequence]:
        """The sequences that are preempted with it, including itself."""
        return self.beam_group or [self]


@dataclass(frozen=True, slots=True)
class Limits:
    """Size limits of the scheduler."""

    block_size: int
    max_batch: int
    max_tokens: int
    windows: tuple[AttentionWindow, ...] = (None,)
    """Attention window of each group of layers."""
    prefill_chunk: int | None = None
    """Most prefill tokens in total in a step in which others decode; None: the rest of `max_tokens`."""

    def prefill(self, decoding: bool) -> int:
        """Token budget for prefills in a step."""
        return self.max_tokens if self.prefill_chunk is None or not decoding else self.prefill_chunk

    def blocks(self, tokens: int) -> int:
        """Blocks that hold this many tokens, in one group."""
        return -(-tokens // self.block_size)

    def least(self, tokens: int, whole: int = 1) -> list[int]:
        """Per group: the most blocks that a sequence of `tokens` holds at once if it is computed in the smallest
        possible steps, `whole` tokens each."""
        return [min(self.blocks(tokens), self._reached(window, tokens, whole)) for window in self.windows]

    def _reached(self, back: AttentionWindow, tokens: int, whole: int) -> int:
        if back is None:
            return self.blocks(tokens)
        if isinstance(back, Chunked):  # all but the last token of a chunk, plus the step's tokens
            return self.blocks(back.size - 1 + whole)
        # the window of the next token; at worst the last token of the step is alone in a block
        return self.blocks(back + whole - 2) + 1

    def least_of(self, sequence: ScheduledSequence) -> list[int]:
        """`least` for the remaining computation of an existing sequence."""
        coming = [span for span in sequence.spans if span[0] >= sequence.computed]
        return self.least(sequence.length, longest_of(coming))

    def need(self, tokens: int, whole: int = 1) -> int:
        """Blocks needed at least to compute a sequence of `tokens`, over all groups."""
        return sum(self.least(tokens, whole))

    def longest(self, num_blocks: int, most: int, whole: int = 1) -> int:
        """The most tokens, up to `most`, that a sequence can have with this many blocks."""
        return bisect_right(range(most + 1), num_blocks, key=lambda tokens: self.need(tokens, whole)) - 1

    def tails(self, sequence: ScheduledSequence) -> list[int]:
        """Per group: the partly filled block that its next token goes to, if other sequences may hold it too."""
        if not sequence.forked or not sequence.computed % self.block_size:
            return []
        return [table.blocks[sequence.computed // self.block_size - table.first] for table in sequence.tables]


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """One sequence's part of a step."""

    sequence: ScheduledSequence
    start: int
    """First token to compute; all tokens before it are in the cache."""
    tokens: int
    allocate: int
    """New blocks that it needs in each group."""
    hit: tuple[tuple[int, ...], ...] = ()
    """Cached blocks found at admission, per group: the visible ones before `start`."""
    copy: bool = False
    """Other sequences hold the blocks that its first token goes to: it gets copies of them."""
    drafts: int = 0
    """How many of `tokens` are drafts: the last of them."""
    wanted: int = 0
    """`ScheduledSequence.wanted` for a sequence that is being admitted."""
    keep: tuple[int, ...] = ()
    """Block boundaries, or its end, at which the run keeps its state, in order."""

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next step does: first the preemptions, then the runs."""

    preempt: tuple[ScheduledSequence, ...] = ()
    runs: tuple[ScheduledTokens, ...] = ()


class Ledger:
    """The pool's state as it will be after the decisions so far. The pool itself is only read."""

    def __init__(self, pool: BlockPool) -> None:
        self._references = pool.references
        self._change: Counter[int] = Counter()
        self.available = pool.available

    def drop(self, blocks: Seq[int]) -> None:
        for block in blocks:
            self._change[block] -= 1
            self.available += self._references[block] + self._change[block] == 0

    def holders(self, block: int) -> int:
        return self._references[block] + self._change[block]

    def shared(self, tails: Seq[int]) -> bool:
        """Whether other sequences hold these tail blocks: if one group's tail is shared, all groups' tails are."""
        return bool(tails) and self.holders(tails[0]) > 1

    def unused(self, blocks: Seq[int]) -> int:
        """How many of these blocks would leave `available` if they were shared."""
        return sum(self._references[block] + self._change[block] == 0 for block in blocks)

    def share(self, blocks: Seq[int]) -> None:
        self.available -= self.unused(blocks)
        self._change.update(blocks)

    def take(self, count: int) -> None:
        self.available -= count


def missing(limits: Limits, sequence: ScheduledSequence, held: Seq[int]) -> int:
    """Blocks that a sequence still needs, given the number it holds in each group."""
    return sum(max(0, least - have) for least, have in zip(limits.least_of(sequence), held, strict=True))
