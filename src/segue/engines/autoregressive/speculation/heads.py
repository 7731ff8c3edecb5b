"""Drafters with trained heads on the target's hidden states: a chain head, and parallel heads.

A chain head (EAGLE, multi-token prediction) is a small decoder with its own KV cache that drafts token by token. Its
input i pairs the target's hidden state of token i with the embedding of token i + 1, and it predicts token i + 2; after
its first draft it continues from its own hidden states. Each step of the target provides the hidden states of accepted
tokens; they are run at once and overwrite the slots of the head's own drafts. Hidden states of tokens found in the
prefix cache were never computed: such a sequence starts late, and the head sees less of it. Parallel heads each predict
one of the next tokens from the target's last hidden state (Medusa: Cai et al., 2024, §2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from segue.engines.autoregressive.speculation.cache import DraftCache, Span
from segue.engines.autoregressive.speculation.contract import ChainHead, ParallelHeads
from segue.engines.autoregressive.speculation.drafter import Computed, Wanted, draft_ids
from segue.engines.autoregressive.speculation.model import last_rows


class HeadsDrafter:
    """Drafts with `ParallelHeads`. Keeps one row per sequence: the hidden state of its last computed token."""

    def __init__(self, heads: ParallelHeads) -> None:
        self._heads = heads
        self._last: dict[str, tuple[int, torch.Tensor]] = {}
        """Key → (index of the token, its hidden state [hidden])."""

    def rows(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return hidden

    def observe(self, computed: Sequence[Computed]) -> None:
        for entry in computed:
            # a copy, because a view would keep the rows of the whole step alive
            self._last[entry.key] = entry.start + len(entry.rows) - 1, entry.rows[-1].clone()

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        live = []
        for place, entry in enumerate(wanted):
            last = self._last.get(entry.key)
            if last is not None and last[0] == len(entry.ids) - 2:
                live.append(place)
        if not live:
            return drafts
        logits = self._heads.logits(torch.stack([self._last[wanted[place].key][1] for place in live]))
        for head in range(self._heads.count):
            some = [row for row, place in enumerate(live) if head < wanted[place].most]
            if not some:
                break
            chosen = logits[torch.tensor(some, device=logits.device), head]
            drawn = draft_ids(chosen, [wanted[live[row]] for row in some], [drafts[live[row]] for row in some])
            for row, token in zip(some, drawn, strict=True):
                drafts[live[row]].append(token)
        return drafts

    def forget(self, key: str) -> None:
        self._last.pop(key, None)

    def audit(self) -> None:
        """Rows are not shared, so there is nothing to check."""


@dataclass(slots=True)
class _State:
    """State of one sequence: pairs [origin, done) are in the cache, in slots [0, done - origin)."""

    origin: int
    done: int
    hidden: torch.Tensor
    """[hidden]: the head's own hidden state of the last pair."""
    out: torch.Tensor
    """[hidden]: the input of its `logits`."""
    position: int
    """Position of the last pair."""


class ChainDrafter:
    """Drafts with a `ChainHead`."""

    def __init__(
        self, head: ChainHead, num_blocks: int, block_size: int, device: torch.device, vocab_size: int
    ) -> None:
        self._head = head
        self._device = device
        self._vocab_size = vocab_size
        self._cache = DraftCache(head.kv, num_blocks, block_size, device)
        self._states: dict[str, _State] = {}

    def rows(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return self._head.rows(hidden)

    def observe(self, computed: Sequence[Computed]) -> None:
        spans, rows, ids, positions, fresh = [], [], [], [], []
        keep = {entry.key for entry in computed}
        for entry in computed:
            state = self._states.get(entry.key)
            if entry.key not in self._cache:
                state = None
            end = entry.start + len(entry.rows)
            begin = entry.start if state is None or state.done < entry.start else state.done
            if begin >= end:
                continue  # recomputed after a preemption: the pairs are the same
            origin = entry.start if state is None or state.done < entry.start else state.origin
            if not self._cache.reserve(entry.key, end - origin, keep):
                self.forget(entry.key)
                continue
            skip = begin - entry.start
            spans.append(Span(entry.key, begin - origin, end - origin))
            rows.append(entry.rows[skip:])
            ids.append(torch.tensor(entry.ids[begin + 1 : end + 1], device=self._device))
            positions.append(entry.positions[skip:])
            fresh.append((entry.key, origin, end))
        if not spans:
            return
        hidden, out = self._forward(spans, rows, ids, positions)
        places = torch.stack([piece[-1] for piece in positions]).tolist()
        for number, (key, origin, end) in enumerate(fresh):
            self._states[key] = _State(origin, end, hidden[number], out[number], places[number])

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        keep = {entry.key for entry in wanted}
        live = []
        for place, entry in enumerate(wanted):
            state = self._states.get(entry.key)
            if state is None or entry.key not in self._cache or state.done != len(entry.ids) - 1:
                continue
            if self._cache.reserve(entry.key, state.done - state.origin + entry.most - 1, keep):
                live.append(place)
        if not live:
            return drafts
        states = {place: self._states[wanted[place].key] for place in live}
        hidden = torch.stack([states[place].hidden for place in live])
        out = torch.stack([states[place].out for place in live])
        while live:
            drawn = draft_ids(
                self._head.logits(out), [wanted[place] for place in live], [drafts[place] for place in live]
            )
            for place, token in zip(live, drawn, strict=True):
                drafts[place].append(token)
            going = [row for row, place in enumerate(live) if len(drafts[place]) < wanted[place].most]
            live = [live[row] for row in going]
            if live:
                depth = len(drafts[live[0]])
                spans = []
                for place in live:
                    slot = states[place].done - states[place].origin + depth - 1
                    spans.append(Span(wanted[place].key, slot, slot + 1))
                positions = torch.tensor([states[place].position + depth for place in live], device=self._device)
                ids = torch.tensor([drafts[place][-1] for place in live], device=self._device)
                rows = hidden[torch.tensor(going, device=self._device)]
                hidden, out = self._forward(spans, rows.split(1), ids.split(1), positions.split(1))
        return drafts

    def _forward(
        self,
        spans: Sequence[Span],
        rows: Sequence[torch.Tensor],
        ids: Sequence[torch.Tensor],
        positions: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([spans, hidden], [spans, hidden]): the head's own hidden state and output after each span's last pair."""
        order, paged = self._cache.step(spans)
        tokens = torch.cat([ids[place] for place in order])
        hidden, out = self._head.forward(
            torch.cat([rows[place] for place in order]),
            # a medium's placeholder may lie outside the vocabulary
            tokens.clamp_(0, self._vocab_size - 1),
            torch.cat([positions[place] for place in order]),
            paged,
        )
        last = last_rows([spans[place] for place in order], order, hidden.device)
        return hidden[last], out[last]

    def forget(self, key: str) -> None:
        self._states.pop(key, None)
        self._cache.release(key)

    def audit(self) -> None:
        self._cache.audit()
        for key, state in self._states.items():
            assert state.origin < state.done, f"{key}: pairs [{state.origin}, {state.done})"
