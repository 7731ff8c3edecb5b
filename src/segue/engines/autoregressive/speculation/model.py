"""A drafter with a smaller model of the same vocabulary (Leviathan et al., 2023; Chen et al., 2023).

It uses the same kind of stage model as the target, with its own KV cache. In each step its cached tokens are compared
with the sequence, and it continues after their common prefix; so rejected drafts, preemptions and pauses need no
special handling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from segue.engines.autoregressive.contract import AutoregressiveModel, FlatBatch
from segue.engines.autoregressive.speculation.cache import DraftCache, Span
from segue.engines.autoregressive.speculation.drafter import Computed, Wanted, draft_ids


@dataclass(slots=True)
class _State:
    """The cached tokens of one sequence."""

    known: int = 0
    """Number of its first tokens, which cannot change any more."""
    drafted: list[int] = field(default_factory=list)
    """Drafts after those."""

    def agree(self, ids: Sequence[int]) -> int:
        """Number of cached tokens that agree with the sequence; the last token must always be computed."""
        for token, real in zip(self.drafted, ids[self.known :], strict=False):
            if token != real:
                break
            self.known += 1
        self.drafted = []
        self.known = min(self.known, len(ids) - 1)
        return self.known


class ModelDrafter:
    """Drafts with a stage model. Computes at most `budget` tokens per step of sequences that it must catch up with;
    longer ones take several steps, and have no drafts until then."""

    def __init__(
        self, model: AutoregressiveModel, vocab_size: int, num_blocks: int, block_size: int, budget: int
    ) -> None:
        """`vocab_size`: of the target; the ids of both mean the same tokens."""
        self._model = model
        self._vocab_size = vocab_size
        self._cache = DraftCache(model.kv, num_blocks, block_size, model.device)
        self._budget = budget
        self._states: dict[str, _State] = {}

    def rows(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None

    def observe(self, computed: Sequence[Computed]) -> None:
        """Never called, because `rows` returns None."""

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        logits, live = self._catch_up(wanted)
        while live and logits is not None:
            drawn = draft_ids(logits, [wanted[place] for place in live], [drafts[place] for place in live])
            for place, token in zip(live, drawn, strict=True):
                drafts[place].append(token)
            live = [place for place in live if len(drafts[place]) < wanted[place].most]
            # it cannot continue from tokens outside its own vocabulary
            live = [place for place in live if drafts[place][-1] < self._model.vocab_size]
            if live:
                logits = self._forward([_next(wanted[place], drafts[place]) for place in live])
        for entry, drafted in zip(wanted, drafts, strict=True):
            if drafted:
                self._states[entry.key].drafted = drafted[:-1]  # the last one was never an input
        return drafts

    def _catch_up(self, wanted: Sequence[Wanted]) -> tuple[torch.Tensor | None, list[int]]:
        """Compute missing tokens: (logits after the last token [n, vocab], indices of the sequences now complete)."""
        pieces: list[tuple[Span, Sequence[int]]] = []
        whole: list[int | None] = []
        budget = self._budget
        keep = {entry.key for entry in wanted}
        for place, entry in enumerate(wanted):
            count = len(entry.ids)
            if not entry.plain or count + entry.most > self._model.max_model_len or budget <= 0:
                continue
            if entry.key not in self._cache:
                self._states.pop(entry.key, None)
            if not self._cache.reserve(entry.key, count + entry.most, keep):
                continue
            state = self._states.setdefault(entry.key, _State())
            start = state.agree(entry.ids)
            stop = min(count, start + budget)
            budget -= stop - start
            if max(entry.ids[start:stop]) >= self._model.vocab_size:
                continue
            state.known = stop
            pieces.append((Span(entry.key, start, stop), entry.ids[start:stop]))
            whole.append(place if stop == count else None)
        if not pieces:
            return None, []
        logits = self._forward(pieces)
        ready = [row for row, place in enumerate(whole) if place is not None]
        return logits[torch.tensor(ready, dtype=torch.long, device=logits.device)], [
            place for place in whole if place is not None
        ]

    def _forward(self, pieces: Sequence[tuple[Span, Sequence[int]]]) -> torch.Tensor:
        """[pieces, vocab] logits after the last token of each piece."""
        model = self._model
        order, paged = self._cache.step([span for span, _ in pieces])
        ids = torch.tensor([token for place in order for token in pieces[place][1]], device=model.device)
        spans = [pieces[place][0] for place in order]
        positions = torch.cat([torch.arange(span.start, span.stop, device=model.device) for span in spans])
        batch = FlatBatch(
            ids, None, positions.expand(model.axes, -1), paged, [(None, span.start, span.stop) for span in spans]
        )
        hidden, _ = model.forward(model.embed(ids, None), batch)
        logits = model.logits(hidden[last_rows(spans, order, hidden.device)])
        missing = self._vocab_size - logits.shape[1]
        return pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def forget(self, key: str) -> None:
        self._states.pop(key, None)
        self._cache.release(key)

    def audit(self) -> None:
        self._cache.audit()


def _next(entry: Wanted, drafts: Sequence[int]) -> tuple[Span, Sequence[int]]:
    """The span and token of its last draft."""
    stop = len(entry.ids) + len(drafts)
    return Span(entry.key, stop - 1, stop), drafts[-1:]


def last_rows(spans: Sequence[Span], order: Sequence[int], device: torch.device) -> torch.Tensor:
    """[spans] flat row of each span's last token, by the spans' original indices. `spans` are in flat order."""
    rows, end = [0] * len(spans), 0
    for span, place in zip(spans, order, strict=True):
        end += span.stop - span.start
        rows[place] = end - 1
    return torch.tensor(rows, device=device)
