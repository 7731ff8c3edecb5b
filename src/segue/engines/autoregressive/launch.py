"""The half of a step that is launched: from a decision to tensors on the device, of which nothing is read back here but
by what must decide on the host (beams, log-probabilities of prompts, grammars)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from segue.engines.autoregressive.beam_group import BeamGroup
from segue.engines.autoregressive.contract import AutoregressiveAdapter
from segue.engines.autoregressive.decode_graphs import DecodeGraphs
from segue.engines.autoregressive.inputs import Newest, Scheduled, flat_batch
from segue.engines.autoregressive.jobs import Run
from segue.engines.autoregressive.picks import Drawn, Pick, branched, targets
from segue.engines.autoregressive.prompt_logprobs import gather_prompt_logprobs
from segue.engines.autoregressive.roster import Roster
from segue.kernels.kv_layout import KVLayout
from segue.kernels.kv_store import KVStore
from segue.kernels.paged_step import HybridStep, PagedStep, paged_step
from segue.kernels.part import Part, step_order, within_chunks
from segue.kernels.staging import Readback, upload
from segue.kernels.state_store import StateStore, Stretch, state_step
from segue.messages.errors import StageFailed


@dataclass(slots=True)
class Ran:
    """What the model gave for a flat batch, or will have given when the device has come to it."""

    hidden: torch.Tensor
    """[tokens, hidden]"""
    captured: torch.Tensor | None
    """[tokens, width]"""
    attention: PagedStep | HybridStep
    positions: torch.Tensor
    """[tokens] on the first rotary axis."""
    drawn: Drawn | None
    """None where no sequence draws a token."""
    searches: list[BeamGroup]
    """The beam searches that have sequences in this step."""
    back: Readback
    """[tokens] whether the states are finite, and what `drawn` gave."""


@dataclass(slots=True)
class Flight:
    """A step from its launch to its landing."""

    scheduled: list[Scheduled]
    ran: Ran | StageFailed
    """The failure of a batch that could not be launched, or did not come back."""
    began: float
    open: bool
    """What follows it can be launched before it has landed."""
    expected: bool = False
    """Its sequences look as if it had landed (`AutoregressiveEngine._expect`)."""

    @property
    def runs(self) -> list[Run]:
        return [run for _, run in self.scheduled]

    @property
    def newest(self) -> Newest | None:
        drawn = None if isinstance(self.ran, StageFailed) else self.ran.drawn
        return None if drawn is None else drawn.newest


@dataclass(slots=True)
class Landed:
    """What a step gave, on the host."""

    finite: np.ndarray
    """[tokens] bool"""
    picks: dict[str, Pick] = field(default_factory=dict)
    """By sequence."""


class Launcher:
    """Has the model run what was decided."""

    def __init__(
        self,
        adapter: AutoregressiveAdapter,
        store: KVStore,
        graphs: DecodeGraphs | None,
        share_size: int,
        states: StateStore | None = None,
    ) -> None:
        """`share_size`: tokens of a block that can be shared; 0: none can. `states`: where the decoder keeps any."""
        self._adapter = adapter
        self._store = store
        self.graphs = graphs
        self.recorded_steps = 0
        """Steps that ran from one of them."""
        self._share_size = share_size
        self._states = states

    def plan(self, runs: Seq[Run], roster: Roster) -> tuple[list[Scheduled], PagedStep | HybridStep]:
        """The sequences of the step in the order of the flat batch, and what attention needs to know of them."""
        ordered = sorted(runs, key=step_order)
        scheduled = [Scheduled(roster[run.job.key], run) for run in ordered]
        groups = [
            paged_step(
                self._store,
                [part for run in ordered for part in _parts(run, group, self._store.layout, self._store.block_size)],
            )
            for group in range(self._store.layout.groups)
        ]
        return scheduled, groups[0] if len(groups) == 1 else HybridStep(groups, self._store.layout.group_of)

    def run(self, scheduled: list[Scheduled], attention: PagedStep | HybridStep, newest: Newest | None) -> Ran:
        """Forward, logits, draws. `newest`: tokens of the step before, where that has not landed."""
        adapter = self._adapter
        states = None if self._states is None else state_step(self._states, _stretches([run for _, run in scheduled]))
        embeds, batch = flat_batch(adapter, scheduled, attention, newest, states)
        recorded = None if self.graphs is None else self.graphs.run(embeds, batch)
        self.recorded_steps += recorded is not None
        hidden, captured = recorded or adapter.forward(embeds, batch)
        if captured is not None and self._store.rows is not None:
            captured = captured.to(self._store.rows.dtype)
            self._store.rows.index_copy_(0, attention.slots, captured)
        finite = torch.isfinite(hidden.sum(dim=-1, dtype=torch.float32))
        gather_prompt_logprobs(adapter, scheduled, hidden)
        searches = list(
            dict.fromkeys(sequence.branches for sequence, _ in scheduled if isinstance(sequence.branches, BeamGroup))
        )
        drawn = self._draw(scheduled, hidden)
        back = Readback([finite, *(drawn.tensors if drawn is not None else ())])
        return Ran(hidden, captured, attention, batch.positions[0], drawn, searches, back)

    def read(self, ran: Ran) -> Landed:
        """Waits for the device."""
        finite, *arrays = ran.back.wait()
        return Landed(finite, {} if ran.drawn is None else ran.drawn.settle(arrays, self._adapter.vocabulary))

    def _draw(self, scheduled: list[Scheduled], hidden: torch.Tensor) -> Drawn | None:
        wanted, of_beams = branched(targets(scheduled), self._share_size)
        rows = [row for target in wanted for row in target.rows]
        count = len(rows)
        rows += [row for beams in of_beams.values() for row in beams]
        if not rows:
            return None
        alike = rows == list(range(len(hidden)))
        logits = self._adapter.logits(
            hidden if alike else hidden.index_select(0, upload(np.array(rows), hidden.device))
        )
        drawn = Drawn(wanted, logits[:count]) if wanted else None
        at = count
        for search, beams in of_beams.items():
            search.pick(logits[at : at + len(beams)])
            at += len(beams)
        return drawn


def _parts(run: Run, group: int, layout: KVLayout, block_size: int) -> list[Part]:
    """The run as a group of layers sees it: counted from the first block it still has."""
    table = run.job.tables[group]
    before = table.first * block_size
    spans = run.job.mutual if layout.ahead[group] else ()
    mutual = [(start - before, stop - before) for start, stop in spans if run.start <= start < run.stop]
    part = Part(table.blocks, run.start - before, run.stop - before, mutual)
    return within_chunks(part, layout.windows[group], before, block_size)


def _stretches(runs: Seq[Run]) -> list[Stretch]:
    """The runs, cut where their states are kept."""
    stretches = []
    for run in runs:
        assert run.job.slot is not None
        start = run.start
        for place in sorted({*(place for place in run.keep if place in run.job.held), run.stop}):
            stretches.append(Stretch(run.job.slot, start, place, run.job.held.get(place)))
            start = place
    return stretches
