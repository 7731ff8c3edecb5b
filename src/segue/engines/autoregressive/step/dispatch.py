"""Dispatches a step: turns a decision into tensors on the device and starts the model. Results are read back here only
if they must be decided on the host (beams, log-probabilities of prompts, grammars)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from segue.engines.autoregressive.branches.beam_group import BeamGroup
from segue.engines.autoregressive.contract import AutoregressiveModel
from segue.engines.autoregressive.sample.draw import SampledTokens, StepResult, branched, drawing
from segue.engines.autoregressive.sample.prompt_logprobs import gather_prompt_logprobs
from segue.engines.autoregressive.schedule.decision import ScheduledTokens
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.step.active import ActiveSequences
from segue.engines.autoregressive.step.advance import Advance
from segue.engines.autoregressive.step.decode_graphs import DecodeGraphs
from segue.engines.autoregressive.step.inputs import flat_batch
from segue.kernels.attention.paged_step import (
    HybridStep,
    PagedStep,
    Part,
    joined,
    paged_step,
    step_order,
    within_chunks,
)
from segue.kernels.kv.layout import KVLayout
from segue.kernels.kv.states import StateStore, Stretch, state_step
from segue.kernels.kv.store import KVStore
from segue.kernels.staging import Readback, upload
from segue.messages.errors import StageFailed
from segue.parallel.ranks import ALONE, Ranks


@dataclass(slots=True)
class StepInFlight:
    """A step from its dispatch to its completion: its tensors may still be computing on the device."""

    runs: dict[Sequence, ScheduledTokens]
    """In the order of the flat batch."""
    attention: PagedStep | HybridStep
    failure: StageFailed | None = None
    """The batch could not be dispatched: the fields below were not filled. The engine sets it."""
    open: bool = False
    """The next step can be dispatched before this one completes. The engine sets it."""
    expected: bool = False
    """Its sequences were advanced as if it had completed (`AutoregressiveEngine._expect`)."""
    began: float = 0.0
    """`time.perf_counter()` before it was decided. The engine sets it."""
    drawn: SampledTokens | None = None
    """None if no sequence draws a token. `Dispatcher.run` fills this and all below."""
    captured: torch.Tensor | None = None
    """[tokens, width]"""
    searches: list[BeamGroup] = field(default_factory=list)
    """The beam searches that have sequences in this step."""
    hidden: torch.Tensor = field(init=False)
    """[tokens, hidden]"""
    positions: torch.Tensor = field(init=False)
    """[tokens] on the first rotary axis."""
    back: Readback = field(init=False)
    """[tokens] whether the hidden states are finite, and the tensors of `drawn`."""


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

    def plan(self, runs: Seq[ScheduledTokens], active: ActiveSequences) -> StepInFlight:
        """Order the runs of a decision as the flat batch, with the metadata for attention."""
        ordered = sorted(runs, key=step_order)
        groups = [
            paged_step(
                self._store,
                [part for run in ordered for part in _parts(run, group, self._store.layout, self._store.block_size)],
            )
            for group in range(self._store.layout.groups)
        ]
        attention = joined(groups, self._store.layout.group_of)
        return StepInFlight({active[run.sequence.key]: run for run in ordered}, attention)

    def run(self, step: StepInFlight, before: SampledTokens | None) -> None:
        """Forward, logits, draws. `before`: what the previous step draws if it has not completed."""
        model, runs = self._model, step.runs
        states = None if self._states is None else state_step(self._states, _stretches(runs.values()))
        groups = 0 if self.advance is None else self.advance.groups
        embeds, batch = flat_batch(model, runs, step.attention, before, states, groups=groups)
        recorded = None if self.graphs is None else self.graphs.run(embeds, batch)
        self.recorded_steps += recorded is not None
        step.hidden, captured = recorded or model.forward(embeds, batch)
        if captured is not None and self._store.rows is not None:
            captured = captured.to(self._store.rows.dtype)
            self._store.rows.index_copy_(0, step.attention.slots, captured)
        step.captured, step.positions = captured, batch.positions[0]
        finite = torch.isfinite(step.hidden.sum(dim=-1, dtype=torch.float32))
        gather_prompt_logprobs(model, runs, step.hidden)
        step.searches = list(
            dict.fromkeys(sequence.branches for sequence in runs if isinstance(sequence.branches, BeamGroup))
        )
        step.drawn = self._draw(runs, step.hidden, before)
        results = [finite, *(step.drawn.tensors if step.drawn is not None else ())]
        self._ranks.agree(results)
        step.back = Readback(results)

    def read(self, step: StepInFlight) -> dict[Sequence, StepResult]:
        """Wait for the device and return the results of its sequences, and of forks that draw from their rows."""
        finite, *arrays = step.back.wait()
        results = {} if step.drawn is None else step.drawn.settle(arrays, self._model.vocabulary)
        end = 0
        for sequence, run in step.runs.items():
            begin, end = end, end + run.tokens
            results.setdefault(sequence, StepResult()).finite = bool(finite[begin:end].all())
        return results

    def _draw(
        self, runs: Mapping[Sequence, ScheduledTokens], hidden: torch.Tensor, before: SampledTokens | None
    ) -> SampledTokens | None:
        wanted, of_beams = branched(drawing(runs), self._share_size)
        rows = [row for its in wanted.values() for row in its]
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
            recent = None if self.advance is None else self.advance.recent(wanted, before)
            drawn = SampledTokens(wanted, logits[:count], hidden[:count], self.advance, recent)
        if of_beams:  # a search reads them on the host
            self._ranks.agree([logits[count:]])
        at = count
        for search, beams in of_beams.items():
            search.pick(logits[at : at + len(beams)])
            at += len(beams)
        return drawn


def _parts(run: ScheduledTokens, group: int, layout: KVLayout, block_size: int) -> list[Part]:
    """The run in a group's own token positions, which count from the first block that the group still holds."""
    table = run.sequence.tables[group]
    before = table.first * block_size
    spans = run.sequence.bidirectional if layout.ahead[group] else ()
    bidirectional = [(start - before, stop - before) for start, stop in spans if run.start <= start < run.stop]
    part = Part(table.blocks, run.start - before, run.stop - before, bidirectional)
    return within_chunks(part, layout.windows[group], before, block_size)


def _stretches(runs: Iterable[ScheduledTokens]) -> list[Stretch]:
    """The runs, split where their states are kept."""
    stretches = []
    for run in runs:
        assert run.sequence.slot is not None
        start = run.start
        for place in sorted({*(place for place in run.keep if place in run.sequence.held), run.stop}):
            stretches.append(Stretch(run.sequence.slot, start, place, run.sequence.held.get(place)))
            start = place
    return stretches
