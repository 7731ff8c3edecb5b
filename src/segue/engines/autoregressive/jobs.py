"""What the scheduler decides over and says: sequences, sizes, and the runs of a step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from segue.engines.autoregressive.mutual import longest_of
from segue.engines.autoregressive.policies import Rank
from segue.kernels.look_back import Chunked, LookBack


@dataclass(slots=True)
class Table:
    """A sequence's blocks in one group of layers."""

    first: int = 0
    """Blocks before this one lie wholly behind the group's window and were given back."""
    blocks: list[int] = field(default_factory=list)
    """`blocks[i]` holds tokens [(first + i) * block_size, (first + i + 1) * block_size)."""


@dataclass(slots=True, eq=False)
class Job:
    """A sequence as the scheduler sees it. The engine owns `length`, `ready`, `drafts`, `hashes`, `fresh`, `mutual`,
    `entire` and `paused`; the scheduler owns `computed`, `launched`, `tables`, `slot`, `wanted`, `held`, `guessed`,
    `newest`, `forked` and `running`."""

    key: str
    rank: Rank
    """(priority, arrival, serial): lower runs first (`policies.rank`)."""
    length: int = 0
    """Known tokens: prompt and generated. 0: the prompt is not there yet."""
    ready: int = 0
    """Tokens whose inputs are there: all known ones, but for conditioning that has not arrived."""
    drafts: int = 0
    """Guessed tokens after the known ones, to be verified in the step that computes the last known one."""
    computed: int = 0
    """Tokens in the KV cache."""
    launched: int = 0
    """Tokens up to here are being computed by a step that has not landed; 0: no step has it."""
    tables: list[Table] = field(default_factory=list)
    """One per group of layers, all reaching equally far; none while it waits."""
    hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the full blocks that may be shared."""
    fresh: bool = False
    """Take no blocks from the prefix cache: every row of the prompt is wanted."""
    mutual: tuple[tuple[int, int], ...] = ()
    """Spans of its prompt that are computed whole (`mutual`)."""
    entire: bool = False
    """What is computed of it first, after an admission, is all of it, and what follows goes token by token: its state
    does not go on from several tokens (`StateLayout.continues`)."""
    slot: int | None = None
    """Where its state is, while it runs, of a decoder that keeps any."""
    wanted: int = 0
    """A border of its blocks up to which others began alike: its state there is kept (`snapshots`). 0: none."""
    held: dict[int, int] = field(default_factory=dict)
    """By border: the slot that its state there is written to by a step that has not landed."""
    guessed: tuple[int, int] | None = None
    """The range of the drafts in a step that has not landed, of a sequence with a state."""
    newest: bytes | None = None
    """Under which its state was kept last while it generated: given up for the next such one."""
    paused: bool = False
    running: bool = False
    tenant: str = ""
    charged: int = 0
    """Tokens its tenant was charged for (`policies.Accounts`)."""
    width: int = 1
    """How many sequences it will be in a step, once its prompt is computed and it has been forked."""
    forked: bool = False
    """It may hold blocks that are not full together with others."""
    gang: list[Job] = field(default_factory=list, repr=False)
    """The beams of its request, itself among them; empty where it has none."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """What is computed whole."""
        if self.entire:
            return () if self.computed else ((0, self.ready),)
        return self.mutual

    @property
    def at_once(self) -> int:
        """The most tokens that a running one can take in a step."""
        return 1 if self.entire and self.computed else self.ready - self.computed

    @property
    def runnable(self) -> bool:
        return not self.paused and self.ready > self.computed

    @property
    def decoding(self) -> bool:
        """It wants its next token, and nothing before it is left to compute."""
        return self.running and self.ready - self.computed == 1

    @property
    def end(self) -> int:
        """Its tables reach up to this block."""
        return self.tables[0].first + len(self.tables[0].blocks) if self.tables else 0

    @property
    def blocks(self) -> list[int]:
        """All it holds, over all groups."""
        if len(self.tables) == 1:
            return self.tables[0].blocks
        return [block for table in self.tables for block in table.blocks]

    @property
    def unit(self) -> list[Job]:
        """Those that run in one step or not at all: a gang whose last tokens are ready. Before that, after a
        preemption, each of them catches up by itself."""
        return self.gang if self.gang and self.ready == self.length else [self]

    @property
    def together(self) -> list[Job]:
        """Those that are preempted with it, itself among them."""
        return self.gang or [self]


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes the scheduler keeps to."""

    block_size: int
    max_batch: int
    max_tokens: int
    windows: tuple[LookBack, ...] = (None,)
    """Per group of layers: how far they look back."""
    prefill_chunk: int | None = None
    """Most tokens of prefills, together, in a step in which others decode; None: what `max_tokens` leaves."""

    def prefill(self, decoding: bool) -> int:
        """Tokens for prefills in a step."""
        return self.max_tokens if self.prefill_chunk is None or not decoding else self.prefill_chunk

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens, in one group."""
        return -(-tokens // self.block_size)

    def least(self, tokens: int, whole: int = 1) -> list[int]:
        """Per group: the most blocks that a sequence of so many tokens holds at once, computed in steps as small as can
        be: `whole` tokens of it at once."""
        return [min(self.blocks(tokens), self._reached(window, tokens, whole)) for window in self.windows]

    def _reached(self, back: LookBack, tokens: int, whole: int) -> int:
        if back is None:
            return self.blocks(tokens)
        if isinstance(back, Chunked):  # all but the last token of a chunk, and the step's
            return self.blocks(back.size - 1 + whole)
        # the window of the next token, at worst with the last of the step's alone in a block
        return self.blocks(back + whole - 2) + 1

    def least_of(self, job: Job) -> list[int]:
        """`least` of a sequence that is there, from now on."""
        coming = [span for span in job.spans if span[0] >= job.computed]
        return self.least(job.length, longest_of(coming))

    def need(self, tokens: int, whole: int = 1) -> int:
        """Blocks without which a sequence of so many tokens cannot be computed, over all groups."""
        return sum(self.least(tokens, whole))

    def longest(self, num_blocks: int, most: int, whole: int = 1) -> int:
        """The most tokens, up to `most`, that a sequence can have where there are so many blocks."""
        return bisect_right(range(most + 1), num_blocks, key=lambda tokens: self.need(tokens, whole)) - 1

    def tails(self, job: Job) -> list[int]:
        """Per group: the block with computed tokens that its next one goes to as well, where others may hold it too."""
        if not job.forked or not job.computed % self.block_size:
            return []
        return [table.blocks[job.computed // self.block_size - table.first] for table in job.tables]


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence's part in a step."""

    job: Job
    start: int
    """First token to compute; before it, everything is in the cache."""
    tokens: int
    allocate: int
    """New blocks it needs in each group."""
    hit: tuple[tuple[int, ...], ...] = ()
    """Published blocks found for a sequence that is admitted, per group: those before `start` that can be seen."""
    copy: bool = False
    """Others hold the blocks that its first token goes to: it gets its own, with the same content."""
    drafts: int = 0
    """How many of `tokens` are drafts: the last ones."""
    wanted: int = 0
    """`Job.wanted` of a sequence that is admitted."""
    keep: tuple[int, ...] = ()
    """Borders of blocks on its way, or its end, at which its state is kept, in order."""

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens in the next step: first the preemptions, then the runs."""

    preempt: tuple[Job, ...] = ()
    runs: tuple[Run, ...] = ()
