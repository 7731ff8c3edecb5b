"""Turns the logits of a step into tokens for its sequences."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from segue.engines.autoregressive.branches.beam_group import BeamGroup
from segue.engines.autoregressive.branches.branches import Forks, scored
from segue.engines.autoregressive.contract import Vocabulary
from segue.engines.autoregressive.grammar.grammar import GrammarRows, apply_grammars
from segue.engines.autoregressive.sample.logprobs import Likelihoods, token_logprobs
from segue.engines.autoregressive.sample.penalties import apply_rules
from segue.engines.autoregressive.sample.sampler import RowSampler, choose
from segue.engines.autoregressive.schedule.decision import ScheduledTokens
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.speculation.drafter import accepted
from segue.kernels.staging import upload
from segue.messages.deltas import TokenLogprobs


@dataclass(slots=True)
class StepResult:
    """What a step gives one sequence."""

    finite: bool = True
    """False if a hidden state was NaN or infinite."""
    finite_logits: bool = True
    """False if a logit was NaN or infinite: then there are no tokens."""
    stuck: bool = False
    """True if the request's constraints forbid every token: then there are no tokens."""
    tokens: list[int] = field(default_factory=list)
    """New tokens; none if its known ones are not all computed yet."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Parallel to `tokens`, if the request asks for them."""
    scores: list[float] = field(default_factory=list)
    """Log-probabilities of `tokens` in the model's own distribution, if they decide which outputs are returned."""
    accepted: int = 0
    """Number of drafts among `tokens`."""
    codes: list[list[int]] = field(default_factory=list)
    """Parallel to `tokens`: their rows, if the stage model yields rows of codes."""


Rows = Mapping[Sequence, range]
"""By sequence that draws: the rows whose logits determine its tokens. The first is that of its last known token; one
row per draft follows."""


def drawing(runs: Mapping[Sequence, ScheduledTokens]) -> dict[Sequence, range]:
    """The sequences whose known tokens are all computed after this step, with their rows of the flat batch."""
    found, end = {}, 0
    for sequence, run in runs.items():
        end += run.tokens
        if run.stop - run.drafts == sequence.scheduled.length:
            found[sequence] = range(end - 1 - run.drafts, end)
    return found


def branched(wanted: Rows, block_size: int) -> tuple[dict[Sequence, range], dict[BeamGroup, list[int]]]:
    """(the sequences that draw tokens, the rows of each beam search's beams, best first).

    A request whose prompt completes in this step is forked here: all its forks draw from the same row.
    """
    draws: dict[Sequence, range] = {}
    searches: dict[BeamGroup, list[int]] = {}
    for sequence, rows in wanted.items():
        branches = sequence.branches
        if isinstance(branches, Forks) and not branches.forked:
            # a fork with several tokens of an earlier attempt must compute those first
            now = [fork for fork in branches.fork(block_size) if fork.scheduled.length == sequence.prompt_length]
            draws.update(dict.fromkeys(now, rows))
        elif not isinstance(branches, BeamGroup):
            draws[sequence] = rows
        elif sequence in branches.beams:
            searches.setdefault(branches, [wanted[beam].start for beam in branches.beams])
        elif not branches.beams:
            searches[branches] = list(rows)
    return draws, searches


def drawn_before(sequence: Sequence) -> int:
    """Tokens generated before the one that it draws; the last of them may not be known on the host."""
    return sequence.scheduled.length - sequence.prompt_length


class CompletesRows(Protocol):
    """Gives the other codes of the rows whose code 0 is drawn: `Advance`."""

    def rows(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        samplers: Seq[RowSampler],
        generated: Seq[int],
        recent: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows [n, groups] long, whether their logits are finite [n] bool). `recent`: as in `Draws`."""


class SampledTokens:
    """Tokens that a step draws, on the device; `settle` turns them into results on the host."""

    def __init__(
        self,
        wanted: Rows,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        advance: CompletesRows | None = None,
        recent: torch.Tensor | None = None,
    ) -> None:
        """`logits` [rows of all sequences, vocab] float32, which may be modified; `hidden` [rows, hidden] gave them.
        `recent`: for `advance` that reads the rows before, as in `Draws`."""
        sequences = [sequence for sequence, rows in wanted.items() for _ in rows]
        self._sequences = sequences
        self.places: dict[Sequence, int] = {}
        """Index in `tokens` of the token after each sequence's known ones."""
        for place, sequence in enumerate(sequences):
            self.places.setdefault(sequence, place)
        self._drafts = {sequence: sequence.drafts[: len(rows) - 1] for sequence, rows in wanted.items()}
        finite = torch.isfinite(logits.sum(dim=-1))
        self._with_logprobs = [row for row, sequence in enumerate(sequences) if sequence.logprobs is not None]
        self._scored = scored(sequences)
        likely = _likelihoods(sequences, self._with_logprobs, logits)
        before = _some(logits, self._scored).log_softmax(dim=-1) if self._scored else None
        samplers, generated = _rules(self._drafts, logits)
        stuck = _stuck(sequences, logits)
        self.tokens = _forced(sequences, choose(logits, samplers, generated))
        """[rows] long; each is within the vocabulary, even if logits are NaN."""
        self.codes: torch.Tensor | None = None
        """[rows, groups] long, if the stage model yields rows of codes."""
        if advance is not None:
            codes, finite_codes = advance.rows(hidden, self.tokens, samplers, generated, recent)
            self.codes = _forced_rows(sequences, codes)
            self.tokens = self.codes[:, 0].contiguous()  # heads may replace it
            finite = finite.logical_and_(finite_codes)
        asked = likely.asked(_some(self.tokens, self._with_logprobs)) if likely else []
        scores = [] if before is None else [before.gather(1, _some(self.tokens, self._scored)[:, None])]
        rows = [] if self.codes is None else [self.codes]
        self.tensors = [self.tokens, finite, stuck, *rows, *scores, *asked]
        """The tensors that `settle` needs on the host."""

    def settle(self, arrays: Seq[np.ndarray], vocabulary: Vocabulary | None) -> dict[Sequence, StepResult]:
        """The results by sequence. `arrays`: `tensors`, copied to the host."""
        rest = list(arrays)
        drawn, finite = rest.pop(0).tolist(), rest.pop(0).tolist()
        stuck = set(np.flatnonzero(rest.pop(0)).tolist())
        codes = None if self.codes is None else rest.pop(0).tolist()
        scores = dict(zip(self._scored, rest.pop(0)[:, 0].tolist() if self._scored else (), strict=True))
        asking = [asked for row in self._with_logprobs if (asked := self._sequences[row].logprobs) is not None]
        likely = dict(zip(self._with_logprobs, token_logprobs(asking, rest, vocabulary) if asking else (), strict=True))
        results = {}
        for sequence, begin in self.places.items():
            drafts = self._drafts[sequence]
            rows = range(begin, begin + len(drafts) + 1)
            result = _settle(drafts, [drawn[row] for row in rows], all(finite[row] for row in rows), rows, stuck)
            kept = rows[: len(result.tokens)]
            result.logprobs = [likely[row] for row in kept if row in likely]
            result.scores = [scores[row] for row in kept if row in scores]
            if codes is not None:
                result.codes = [codes[row] for row in kept]
            results[sequence] = result
        return results


def _rules(drafts: Mapping[Sequence, list[int]], logits: torch.Tensor) -> tuple[list[RowSampler], list[int]]:
    """Apply rules and grammars to the logits; return per row its sampler and its number of generated tokens. `drafts`:
    by sequence; the row after the first j of them sees these j."""
    samplers: list[RowSampler] = []
    generated: list[int] = []
    held: list[GrammarRows] = []
    for sequence, drafted in drafts.items():
        assert sequence.sampler is not None
        # a token of an earlier attempt is taken regardless of the grammar
        if sequence.grammar is not None and sequence.forced is None:
            held.append(GrammarRows(sequence.grammar, len(samplers), drafted))
        for place in range(len(drafted) + 1):
            samplers.append(sequence.sampler.after(drafted[:place]))
            generated.append(drawn_before(sequence) + place)
    if not all(sampler.rules.plain for sampler in samplers):
        apply_rules(logits, [sampler.rules for sampler in samplers], generated)
    apply_grammars(logits, held)
    return samplers, generated


def _forced(sequences: Seq[Sequence], tokens: torch.Tensor) -> torch.Tensor:
    """Replace draws with the last token of an earlier attempt for sequences that have one."""
    forced = [-1 if sequence.forced is None else sequence.forced for sequence in sequences]
    if max(forced) < 0:
        return tokens
    taken = upload(np.array(forced), tokens.device)
    return torch.where(taken < 0, tokens, taken)


def _forced_rows(sequences: Seq[Sequence], codes: torch.Tensor) -> torch.Tensor:
    """Replace rows of codes [rows, groups] with the last one of an earlier attempt for sequences that have one."""
    if not any(sequence.forced_row for sequence in sequences):
        return codes
    forced = [sequence.forced_row or [0] * codes.shape[1] for sequence in sequences]
    has = np.array([[bool(sequence.forced_row)] for sequence in sequences])  # codes that stand for numbers have signs
    return torch.where(upload(has, codes.device), upload(np.array(forced), codes.device), codes)


def _settle(drafts: list[int], drawn: list[int], finite: bool, rows: range, stuck: set[int]) -> StepResult:
    """The result of a sequence from its draws: `drawn` at `rows` of the logits, of which `stuck` have no allowed token.

    A stuck row after drafts only ends them: the next step reaches it again and reports it.
    """
    if not finite:
        return StepResult(finite_logits=False)
    choosable = next((place for place, row in enumerate(rows) if row in stuck), len(rows))
    if not choosable:
        return StepResult(stuck=True)
    count = accepted(drafts[: choosable - 1], drawn[:choosable])
    return StepResult(tokens=drawn[: count + 1], accepted=count)


def _likelihoods(sequences: Seq[Sequence], telling: Seq[int], logits: torch.Tensor) -> Likelihoods | None:
    """The distributions of the rows with requested log-probabilities, before rules change them."""
    wanted = [asked for row in telling if (asked := sequences[row].logprobs) is not None]
    if not wanted:
        return None
    return Likelihoods(_some(logits, telling), wanted)


def _stuck(sequences: Seq[Sequence], logits: torch.Tensor) -> torch.Tensor:
    """[rows] bool: every token is forbidden. Such rows are zeroed so that a draw is defined."""
    if not any(sequence.restricted for sequence in sequences):
        return torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    nothing = logits.amax(dim=-1) == float("-inf")
    logits.masked_fill_(nothing[:, None], 0.0)
    return nothing


def _some(tensor: torch.Tensor, rows: Seq[int]) -> torch.Tensor:
    """Select these distinct rows, in order."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, upload(np.array(rows), tensor.device))
