"""From the logits of a step to the tokens of its sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from segue.engines.autoregressive.beam_group import BeamGroup
from segue.engines.autoregressive.branches import Forks, scored
from segue.engines.autoregressive.contract import Vocabulary
from segue.engines.autoregressive.grammar import Place, apply_grammars
from segue.engines.autoregressive.inputs import Scheduled
from segue.engines.autoregressive.logprobs import Likelihoods
from segue.engines.autoregressive.penalties import apply_rules
from segue.engines.autoregressive.sampler import RowSampler, choose
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.speculation.acceptance import accepted
from segue.messages.deltas import TokenLogprobs


@dataclass(slots=True)
class Target:
    """A sequence that gets tokens in this step, and the rows of the flat batch whose logits decide them."""

    sequence: Sequence
    rows: range
    """That of its last known token, and one per draft after it."""
    drafts: list[int] = field(default_factory=list)
    """Guesses that are verified: `rows[j]` sees drafts[:j]."""


@dataclass(slots=True)
class Pick:
    """What the logits of a target gave."""

    tokens: list[int] = field(default_factory=list)
    """New tokens, at least one where `finite`."""
    finite: bool = True
    """False where a logit was NaN or infinite: then there are no tokens."""
    stuck: bool = False
    """True where what the request forbids leaves no token to choose: then there are no tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Beside `tokens`, where the request asks for them."""
    scores: list[float] = field(default_factory=list)
    """Log-probabilities of `tokens` by the model's own distribution, where they decide which outputs are given."""
    accepted: int = 0
    """How many drafts are among `tokens`."""


def targets(scheduled: Seq[Scheduled]) -> list[Target]:
    """The sequences whose known tokens are all computed after this step."""
    found, end = [], 0
    for sequence, run in scheduled:
        end += run.tokens
        if run.stop - run.drafts == sequence.job.length:
            found.append(Target(sequence, range(end - 1 - run.drafts, end), sequence.drafts[: run.drafts]))
    return found


def branched(wanted: Seq[Target], block_size: int) -> tuple[list[Target], dict[BeamGroup, list[int]]]:
    """(the sequences that draw tokens, by beam search the rows of its beams, best first).

    A request whose prompt is computed with this step is forked here: its forks all draw from the same row.
    """
    drawing: list[Target] = []
    searches: dict[BeamGroup, list[int]] = {}
    of_beam = {target.sequence.job.key: target.rows.start for target in wanted}
    for target in wanted:
        sequence, branches = target.sequence, target.sequence.branches
        if isinstance(branches, Forks) and not branches.forked:
            # one with several tokens of an earlier attempt has those to compute first
            now = [fork for fork in branches.fork(block_size) if fork.job.length == sequence.prompt_length]
            drawing += [Target(fork, target.rows) for fork in now]
        elif not isinstance(branches, BeamGroup):
            drawing.append(target)
        elif sequence in branches.beams:
            searches.setdefault(branches, [of_beam[beam.job.key] for beam in branches.beams])
        elif not branches.beams:
            searches[branches] = list(target.rows)
    return drawing, searches


def pick(wanted: Seq[Target], logits: torch.Tensor, vocabulary: Vocabulary | None) -> dict[str, Pick]:
    """By request. `logits` [rows of all targets, vocab] float32, which may be changed."""
    finite = torch.isfinite(logits.sum(dim=-1)).tolist()
    sequences = [target.sequence for target in wanted for _ in target.rows]
    telling = [row for row, sequence in enumerate(sequences) if sequence.logprobs is not None]
    likely = _likelihoods(sequences, telling, logits)
    places = scored(sequences)
    before = logits[places].log_softmax(dim=-1) if places else logits[:0]
    samplers: list[RowSampler] = []
    generated: list[int] = []
    held: list[Place] = []
    for target in wanted:
        assert target.sequence.sampler is not None
        # a token of an earlier attempt is taken anyway
        if target.sequence.grammar is not None and target.sequence.forced is None:
            held.append(Place(target.sequence.grammar, len(samplers), target.drafts))
        for place in range(len(target.rows)):
            samplers.append(target.sequence.sampler.after(target.drafts[:place]))
            generated.append(target.sequence.generated + place)
    if not all(sampler.rules.plain for sampler in samplers):
        apply_rules(logits, [sampler.rules for sampler in samplers], generated)
    apply_grammars(logits, held)
    stuck = _stuck(sequences, logits)
    # the last token of an earlier attempt is taken, whatever is drawn now
    drawn = [
        token if sequence.forced is None else sequence.forced
        for sequence, token in zip(sequences, choose(logits, samplers, generated), strict=True)
    ]
    scores = {place: row[drawn[place]].item() for row, place in zip(before, places, strict=True)}
    told = dict(zip(telling, likely.of([drawn[row] for row in telling], vocabulary) if likely else (), strict=True))
    picks, begin = {}, 0
    for target in wanted:
        rows = range(begin, begin + len(target.rows))
        begin = rows.stop
        picked = _settle(target.drafts, [drawn[row] for row in rows], all(finite[row] for row in rows), rows, stuck)
        kept = rows[: len(picked.tokens)]
        picked.logprobs = [told[row] for row in kept if row in told]
        picked.scores = [scores[row] for row in kept if row in scores]
        picks[target.sequence.job.key] = picked
    return picks


def _settle(drafts: list[int], drawn: list[int], finite: bool, rows: range, stuck: set[int]) -> Pick:
    """What the draws of one target come to: `drawn` of the `rows` of the logits, `stuck` among them.

    A place after drafts where nothing is left to choose ends them: the next step comes to it, and says so.
    """
    if not finite:
        return Pick(finite=False)
    choosable = next((place for place, row in enumerate(rows) if row in stuck), len(rows))
    if not choosable:
        return Pick(stuck=True)
    count = accepted(drafts[: choosable - 1], drawn[:choosable])
    return Pick(drawn[: count + 1], accepted=count)


def _likelihoods(sequences: Seq[Sequence], telling: Seq[int], logits: torch.Tensor) -> Likelihoods | None:
    """The distributions of the rows that are to be told, before anything changes them."""
    wanted = [asked for row in telling if (asked := sequences[row].logprobs) is not None]
    if not wanted:
        return None
    rows = logits if len(telling) == len(logits) else logits[torch.tensor(telling, device=logits.device)]
    return Likelihoods(rows, wanted)


def _stuck(sequences: Seq[Sequence], logits: torch.Tensor) -> set[int]:
    """Rows of which every token is forbidden; they are made harmless."""
    if not any(sequence.restricted for sequence in sequences):
        return set()
    nothing = (logits.amax(dim=-1) == float("-inf")).nonzero()[:, 0]
    logits[nothing] = 0.0
    return set(nothing.tolist())
