"""Dispatches a step: turns a decision into tensors on the device and starts the model. Results are read back here only
if they must be decided on the host (beams, log-probabilities of prompts, grammars)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from segue.engines.autoregressive.branches.beam_group import BeamGroup
from segue.engines.autoregressive.contract import AutoregressiveModel
from segue.engines.autoregressive.sample.picks import Drawn, Pick, branched, targets
from segue.engines.autoregressive.sample.prompt_logprobs import gather_prompt_logprobs
from segue.engines.autoregressive.schedule.jobs import Run
from segue.engines.autoregressive.step.active import ActiveSequences
from segue.engines.autoregressive.step.advance import Advance
from segue.engines.autoregressive.step.decode_graphs import DecodeGraphs
from segue.engines.autoregressive.step.inputs import Newest, Scheduled, flat_batch
from segue.kernels.attention.paged_step import HybridStep, PagedStep, Part, paged_step, step_order, within_chunks
from segue.kernels.kv.layout import KVLayout
from segue.kernels.kv.states import StateStore, Stretch, state_step
from segue.kernels.kv.store import KVStore
from segue.kernels.staging import Readback, upload
from segue.messages.errors import StageFailed
from segue.parallel.ranks import ALONE, Ranks


@dataclass(slots=True)
class Ran:
    """The model's results for a flat batch; their tensors may still be computing on the device."""

    hidden: torch.Tensor
    """[tokens, hidden]"""
    captured: torch.Tensor | None
    """[tokens, width]"""
    attention: PagedStep | HybridStep
    positions: torch.Tensor
    """[tokens] on the first rotary axis."""
    drawn: Drawn | None
    """None if no sequence draws a token."""
    searches: list[BeamGroup]
    """The beam searches that have sequences in this step."""
    back: Readback
    """[tokens] whether the hidden states are finite, and the tensors of `drawn`."""


@dataclass(slots=True)
class StepInFlight:
    """A step from its dispatch to its completion."""

    scheduled: list[Scheduled]
    ran: Ran | StageFailed
    """The failure of a batch that could not be dispatched or did not complete."""
    began: float
    open: bool
    """The next step can be dispatched before this one completes."""
    expected: bool = False
    """Its sequences were advanced as if it had completed (`AutoregressiveEngine._expect`)."""

    @property
    def runs(self) -> list[Run]:
        return [run for _, run in self.scheduled]

    @property
    def newest(self) -> Newest | None:
        drawn = None if isinstance(self.ran, StageFailed) else self.ran.drawn
        return None if drawn is None else drawn.newest


@dataclass(slots=True)
class StepResult:
    """The results of a step on the host."""

    finite: np.ndarray
    """[tokens] bool"""
    picks: dict[str, Pick] = field(default_factory=dict)
    """By sequence key."""


class Dispatcher:
    """Runs the model on the scheduled sequences."""

    def __init__(
        self,
        model: AutoregressiveModel,
        store: KVStore,
        graphs: DecodeGraphs | None,
        share_size: int,
        states: StateStore | None = None,
        advance: Advance | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`share_size`: block size for prefix sharing; 0: no sharing. `states`: for a decoder with state. `advance`:
        for a stage model that yields rows of codes. `ranks`: all of them take what rank 0 has drawn."""
        self._model = model
        self._store = store
        self.graphs = graphs
        self.recorded_steps = 0
        """Steps that were replayed from `graphs`."""
        self._share_size = share_size
        self._states = states
        self.advance = advance
        self._ranks = ranks

    def plan(self, runs: Seq[Run], active: ActiveSequences) -> tuple[list[Scheduled], PagedStep | HybridStep]:
        """The sequences of the step in the order of the flat batch, and the metadata for attention."""
        ordered = sorted(runs, key=step_order)
        scheduled = [Scheduled(active[run.job.key], run) for run in ordered]
        groups = [
            paged_step(
                self._store,
                [part for run in ordered for part in _parts(run, group, self._store.layout, self._store.block_size)],
            )
            for group in range(self._store.layout.groups)
        ]
        return scheduled, groups[0] if len(groups) == 1 else HybridStep(groups, self._store.layout.group_of)

    def run(self, scheduled: list[Scheduled], attention: PagedStep | HybridStep, newest: Newest | None) -> Ran:
        """Forward, logits, draws. `newest`: tokens of the previous step if it has not completed."""
        model = self._model
        states = None if self._states is None else state_step(self._states, _stretches([run for _, run in scheduled]))
        groups = 0 if self.advance is None else self.advance.groups
        embeds, batch = flat_batch(model, scheduled, attention, newest, states, groups=groups)
        recorded = None if self.graphs is None else self.graphs.run(embeds, batch)
        self.recorded_steps += recorded is not None
        hidden, captured = recorded or model.forward(embeds, batch)
        if captured is not None and self._store.rows is not None:
            captured = captured.to(self._store.rows.dtype)
            self._store.rows.index_copy_(0, attention.slots, captured)
        finite = torch.isfinite(hidden.sum(dim=-1, dtype=torch.float32))
        gather_prompt_logprobs(model, scheduled, hidden)
        searches = list(
            dict.fromkeys(sequence.branches for sequence, _ in scheduled if isinstance(sequence.branches, BeamGroup))
        )
        drawn = self._draw(scheduled, hidden, newest)
        results = [finite, *(drawn.tensors if drawn is not None else ())]
        self._ranks.agree(results)
        back = Readback(results)
        return Ran(hidden, captured, attention, batch.positions[0], drawn, searches, back)

    def read(self, ran: Ran) -> StepResult:
        """Wait for the device and return the results on the host."""
        finite, *arrays = ran.back.wait()
        return StepResult(finite, {} if ran.drawn is None else ran.drawn.settle(arrays, self._model.vocabulary))

    def _draw(self, scheduled: list[Scheduled], hidden: torch.Tensor, newest: Newest | None) -> Drawn | None:
        wanted, of_beams = branched(targets(scheduled), self._share_size)
        rows = [row for target in wanted for row in target.rows]
        count = len(rows)
        rows += [row for beams in of_beams.values() for row in beams]
        if not rows:
            return None
        alike = rows == list(range(len(hidden)))
        if not alike:
            hidden = hidden.index_select(0, upload(np.array(rows), hidden.device))
        logits = self._model.logits(hidden)
        drawn = None
        if wanted:
            recent = None if self.advance is None else self.advance.recent(wanted, newest)
            drawn = Drawn(wanted, logits[:count], hidden[:count], self.advance, recent)
        if of_beams:  # a search reads them on the host
            self._ranks.agree([logits[count:]])
        at = count
        for search, beams in of_beams.items():
            search.pick(logits[at : at + len(beams)])
            at += len(beams)
        return drawn


def _parts(run: Run, group: int, layout: KVLayout, block_size: int) -> list[Part]:
    """The run in a group's own token positions, which count from the first block that the group still holds."""
    table = run.job.tables[group]
    before = table.first * block_size
    spans = run.job.bidirectional if layout.ahead[group] else ()
    bidirectional = [(start - before, stop - before) for start, stop in spans if run.start <= start < run.stop]
    part = Part(table.blocks, run.start - before, run.stop - before, bidirectional)
    return within_chunks(part, layout.windows[group], before, block_size)


def _stretches(runs: Seq[Run]) -> list[Stretch]:
    """The runs, split where their states are kept."""
    stretches = []
    for run in runs:
        assert run.job.slot is not None
        start = run.start
        for place in sorted({*(place for place in run.keep if place in run.job.held), run.stop}):
            stretches.append(Stretch(run.job.slot, start, place, run.job.held.get(place)))
            start = place
    return stretches
