"""Hold and append: a sequence whose input comes in pieces.

    piece ──▶ prefilled ──Then.HOLD──▶ holds ──append──▶ the next piece follows
                  │                      ▲
                  ├──Then.TURN─▶ draws ──╯ (the turn ends)
                  ╰──Then.END──▶ draws ──▶ finished

One seam serves text that is appended to a running request (pieces with `HOLD`, until the input is closed), actions for
a running video and the next turn of a session (pieces with `TURN`), and a walk that returns to a stage: its later visit
is one more piece. A stage model turns the chunks of its upstreams into pieces (`Fed`); the client's own pieces reach it
through the input stage like any other chunk. A stage that is conditioned on rows needs no pieces: it holds whenever its
next row is missing.

A visit of a walk that returns (`StageRequest.returns`) is a turn whose input may come from several stages: all its
pieces hold, and `Holds.go_on` says that they are complete. In a new attempt it is drawn again, each unit as the journal
says, and ends as it did: no row of its tokens comes after its end.

**Holding is waiting for input.** The newest known token of a sequence that holds is not computed: `ready` is below
`length`, exactly as for a conditioned sequence whose next row has not arrived. After a piece the newest token is the
piece's last one, after a turn it is the last one drawn. The next piece, or the end of the input, makes it ready: it is
computed with all that is new, and nothing is computed twice. Pieces that arrive while a turn draws wait in a queue, so
the result does not depend on when they arrive.

**Appended equals sent at once.** A turn gives the same output as a separate request whose prompt is everything before
that turn: pieces and units. Lengths, penalties, stop strings, and the sampler start anew with each turn, and
the random numbers of turn k come from `turn_seed`. So pieces may be split anywhere, and `max_tokens` and `min_tokens`
count per turn.

**Blocks.** They stay with the sequence while it holds. They are counted (`held_blocks`), and taken first when others
need blocks or a state. After `hold_seconds` they are given back at the start of the next step (an idle engine has no
use for them). A sequence without its blocks stays in the engine, `parked`: it is recomputed, from the prefix cache if
possible, when more input arrives, and never before. So holding costs others nothing, and there is no second deadline:
the request's own ends it, as does cancelling.

**Kept.** A request with `Request.keep` holds its blocks after its end as well, under another key, until `hold_seconds`
are over or others need them: then the sequence is removed, for it is never continued itself. A request that goes on
from it is a sequence of its own, whose prompt is all that this one read and drew: it shares the full blocks by the
prefix cache, any number of such requests do, and none depends on them.

**Recovery.** Upstreams keep their chunks, so a new worker gets all pieces again, in order. The journal has the units,
and `TurnEnd` where each finished turn ended: its units are known, nothing is drawn again. Only the last unit of an
unfinished turn is taken as if it were drawn (`Sequence.go_on`).

Refused by name: several outputs, `prompt_logprobs`, and `structured_outputs` with turns.

Optional reading: a request whose input comes at once has one piece, and draws after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from segue.engines.autoregressive.contract import Prompt, Then, row_identity
from segue.engines.autoregressive.schedule.bidirectional import check_bidirectional
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams


@dataclass(slots=True)
class InputPiece:
    """A piece of the input in its sequence, and the units generated after it."""

    prompt: Prompt
    start: int
    """Place in the sequence of its first token."""
    base: int
    """Position of its first token: 0, or the one after the piece before it."""
    own: np.ndarray | None
    """[axes, T] int64: positions relative to `base`, if the prompt has any."""
    codes: list[list[int]] = field(default_factory=list)
    """The rows of the units, if the stage model yields rows of codes."""

    @property
    def length(self) -> int:
        """Tokens of the piece."""
        return len(self.prompt.token_ids)

    def positions(self, start: int, stop: int, axes: int) -> np.ndarray:
        """[axes, stop - start] int64: rotary positions of its tokens [start, stop), counted from its first."""
        if self.own is not None and stop <= self.length:
            return self.own[:, start:stop] + self.base
        after = np.arange(start, stop) + self.base
        if self.prompt.position_delta:
            after[max(0, self.length - start) :] += self.prompt.position_delta
        positions = np.broadcast_to(after, (axes, stop - start))
        if self.own is not None and start < self.length:
            positions = positions.copy()
            positions[:, : self.length - start] = self.own[:, start:] + self.base
        return positions

    @property
    def moved(self) -> bool:
        """Whether its positions do not count on from the sequence's first token."""
        return self.base != self.start or self.own is not None or bool(self.prompt.position_delta)


class Pieces:
    """The pieces of a sequence, in order."""

    def __init__(self, axes: int) -> None:
        self._axes = axes
        self._pieces: list[InputPiece] = []
        self._starts: list[int] = []
        self.input_tokens = 0
        """Tokens of all pieces."""
        self.plain = True
        """The ids represent all of the input: no piece has its own embeddings."""

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def first(self) -> InputPiece:
        return self._pieces[0]

    @property
    def last(self) -> InputPiece:
        return self._pieces[-1]

    def add(self, prompt: Prompt, start: int) -> None:
        """Add a piece that begins at place `start`, the end of the sequence so far."""
        base = start
        if self._pieces:
            last = self.last
            base = last.base + start - last.start + last.prompt.position_delta
        own = None if prompt.positions is None else prompt.positions.cpu().numpy()
        self._pieces.append(InputPiece(prompt, start, base, own))
        self._starts.append(start)
        self.input_tokens += len(prompt.token_ids)
        self.plain = self.plain and prompt.embeds is None

    def shed(self) -> None:
        """Forget embeddings: nothing is computed again."""
        for piece in self._pieces:
            piece.prompt = replace(piece.prompt, embeds=None, extras={})

    def within(self, start: int, stop: int) -> Iterator[tuple[InputPiece, int, int]]:
        """The pieces of tokens [start, stop) of the sequence, each with its range in tokens from its own first."""
        place = bisect_right(self._starts, start) - 1
        while start < stop:
            piece = self._pieces[place]
            place += 1
            end = min(stop, self._starts[place]) if place < len(self._pieces) else stop
            yield piece, start - piece.start, end - piece.start
            start = end

    def positions(self, start: int, stop: int) -> np.ndarray:
        """[axes, stop - start] int64: rotary positions of tokens [start, stop) of the sequence."""
        found = [piece.positions(first, last, self._axes) for piece, first, last in self.within(start, stop)]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1)

    def identity(self, start: int, stop: int, ids: Seq[int]) -> bytes:
        """Identity of tokens [start, stop), whose ids are in `ids`; equal only if K, V and captured rows are equal."""
        items: list[int | bytes] = []
        moved = False
        for piece, first, last in self.within(start, stop):
            prompt, length = piece.prompt, piece.length
            known = prompt.token_ids if prompt.identity is None else prompt.identity
            items += known[first : min(last, length)]
            begin = max(first, length)
            if piece.codes:
                items += [row_identity(row) for row in piece.codes[begin - length : max(0, last - length)]]
            else:
                items += ids[piece.start + begin : piece.start + last]
            moved |= piece.moved
        text = b"".join(b"b%d:%b" % (len(item), item) if isinstance(item, bytes) else b"i%d," % item for item in items)
        positions = self.positions(start, stop) if moved else None
        # a text is the same before media as without any
        return text if positions is None or (positions == np.arange(start, stop)).all() else text + positions.tobytes()

    @property
    def modality_tokens(self) -> dict[str, int]:
        """Input tokens per modality."""
        counts: dict[str, int] = {}
        for piece in self._pieces:
            for kind, count in piece.prompt.modality_tokens.items():
                counts[kind] = counts.get(kind, 0) + count
        return counts


def check_open(stage: str, sampling: SamplingParams, then: Then) -> None:
    """Raise `InvalidRequest` for sampling parameters that a request with open input cannot have."""
    if then is Then.END:
        return
    outputs = (("n", sampling.n), ("best_of", sampling.best_of), ("beam_width", sampling.beam_width))
    for name, value in outputs:
        if (value or 1) > 1:
            raise _refused(stage, name, value, "has one output")
    if sampling.prompt_logprobs is not None:
        raise _refused(stage, "prompt_logprobs", sampling.prompt_logprobs, "gives no log-probabilities of it")
    if then is Then.TURN and sampling.structured_outputs is not None:
        raise _refused(stage, "structured_outputs", "set", "writes them only at its end: append without a reply")


def _refused(stage: str, name: str, value: object, why: str) -> InvalidRequest:
    field = f"sampling.{stage}.{name}"
    return InvalidRequest(f"{field} is {value}, but a request whose input is open {why}", field=field)


class Conditioning:
    """Rows from upstream for generated tokens: row k belongs to token k, the tail to all tokens after the last row."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self.count = 0
        self.tail: torch.Tensor | None = None

    def add(self, rows: torch.Tensor) -> None:
        """Append [n, width] rows."""
        if self._rows is None or self.count + len(rows) > len(self._rows):
            grown = rows.new_empty(max(64, 2 * (self.count + len(rows))), rows.shape[1])
            if self._rows is not None:
                grown[: self.count] = self._rows[: self.count]
            self._rows = grown
        self._rows[self.count : self.count + len(rows)] = rows
        self.count += len(rows)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, width]; the caller has checked that the rows have arrived."""
        given = min(stop, self.count)
        known = [] if self._rows is None or start >= given else [self._rows[start:given]]
        if stop > given:
            assert self.tail is not None, f"rows [{start}, {stop}) wanted, but only {self.count} have arrived"
            known.append(self.tail.expand(stop - max(start, given), -1))
        return known[0] if len(known) == 1 else torch.cat(known)


def check_prompt(prompt: Prompt, axes: int, stage: str) -> None:
    """Reject a stage model's malformed prompt before it spoils a batch."""
    length = len(prompt.token_ids)
    if prompt.embeds is not None and prompt.embeds.shape[0] != length:
        raise StageFailed(f"prompt of {length} tokens with embeds {tuple(prompt.embeds.shape)}", stage=stage)
    if prompt.positions is not None and tuple(prompt.positions.shape) != (axes, length):
        raise StageFailed(
            f"prompt of {length} tokens with positions {tuple(prompt.positions.shape)}, not {(axes, length)}",
            stage=stage,
        )
    check_bidirectional(prompt.bidirectional, length, stage)
    if prompt.identity and len(prompt.identity) != length:
        raise StageFailed(f"prompt of {length} tokens with {len(prompt.identity)} identities", stage=stage)
