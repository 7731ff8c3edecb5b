"""Heads on the target's last hidden state, each for one of the next tokens (Medusa: Cai et al., 2024, §2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from segue.engines.autoregressive.speculation.contract import ParallelHeads
from segue.engines.autoregressive.speculation.drafter import Computed, Wanted
from segue.engines.autoregressive.speculation.guess import guesses


class HeadsDrafter:
    """Keeps one row per sequence: the hidden state of its last computed token."""

    def __init__(self, heads: ParallelHeads) -> None:
        self._heads = heads
        self._last: dict[str, tuple[int, torch.Tensor]] = {}
        """Key → (place of the token, its hidden state [hidden])."""

    def rows(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return hidden

    def observe(self, computed: Sequence[Computed]) -> None:
        for entry in computed:
            # a copy: a view would hold the rows of the whole step
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
            told = guesses(chosen, [wanted[live[row]] for row in some], [drafts[live[row]] for row in some])
            for row, token in zip(some, told, strict=True):
                drafts[live[row]].append(token)
        return drafts

    def forget(self, key: str) -> None:
        self._last.pop(key, None)

    def audit(self) -> None:
        """One row per sequence; nothing is shared."""
