"""Requests with several outputs: the prompt is computed once, then the sequence branches.

`n` and `best_of`: it is forked into sequences that share its blocks and sample independently, fork i with seed + i, so
that each gives the same output as a separate request. To the scheduler each is an ordinary sequence. `beam_width`: it
is forked into beams, which run together (`beam_group`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import msgspec

from segue.engines.autoregressive.branches.beam_group import BeamGroup
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveModel, YieldsRows
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.autoregressive.sequence import Branching, Sequence
from segue.engines.contract import StageRequest
from segue.messages.errors import InvalidRequest

SEED_MASK = 2**64 - 1
SERIALS = 256
"""Serial numbers reserved after a request's own, for its branches: they rank directly after it."""


def prepared(request: StageRequest, model: AutoregressiveModel, config: AutoregressiveConfig) -> StageRequest:
    """The request as the engine serves it. Raises `InvalidRequest` if it asks for an impossible number of outputs."""
    params = request.sampling
    n, forks, beams = params.n or 1, params.best_of or 1, params.beam_width or 1
    if max(n, forks, beams) == 1:
        # one beam is greedy decoding, as in transformers
        return _with(request, temperature=0.0) if params.beam_width else request
    name = "beam_width" if beams > 1 else "best_of" if forks > 1 else "n"
    field = f"sampling.{request.stage}.{name}"
    asked = f"{field} is {max(n, forks, beams)}"
    if request.downstreams:
        fed = ", ".join(sorted(request.downstreams))
        raise InvalidRequest(f"{asked}, but stage {request.stage!r} feeds {fed}: it has one output", field=field)
    if model.conditioned:
        raise InvalidRequest(
            f"{asked}, but stage {request.stage!r} is conditioned on other stages: it has one output", field=field
        )
    if beams > 1 and isinstance(model, YieldsRows):
        raise InvalidRequest(
            f"{asked}, but stage {request.stage!r} yields rows of codes, which beam search does not support",
            field=field,
        )
    for other, value in (("best_of", params.best_of), ("beam_width", params.beam_width)):
        # values that the request omits come from the deployment
        if value is not None and value < n:
            raise InvalidRequest(
                f"{field} is {n}, more than {other} of stage {request.stage!r} ({value})", field=f"{field}"
            )
    if model.kv.states is not None and max(forks, n) > config.max_batch:
        raise InvalidRequest(
            f"{asked}; stage {request.stage!r} keeps states of {config.max_batch} sequences (max_batch)", field=field
        )
    if beams == 1:
        return replace(request, resume=[], resume_others=[]) if forks > n else request
    most = min(config.max_batch, config.max_tokens_per_step)
    if beams > most:
        raise InvalidRequest(f"{asked}; stage {request.stage!r} takes at most {most} sequences in a step", field=field)
    # a search has no partial results to resume from, so it restarts from its beginning
    return replace(_with(request, temperature=0.0), resume=[], resume_others=[])


def _with(request: StageRequest, **changes: float) -> StageRequest:
    return replace(request, sampling=msgspec.structs.replace(request.sampling, **changes))


def begin(sequence: Sequence) -> None:
    """Set up the branches of a new request's sequence; its request is `prepared`."""
    params = sequence.request.sampling
    if (params.beam_width or 1) > 1:
        sequence.branches = BeamGroup(sequence)
    elif max(params.n or 1, params.best_of or 1) > 1:
        sequence.branches = Forks(sequence)


@dataclass(slots=True)
class _Held:
    """An output that has not been emitted yet."""

    output: TokenOutput
    score: float = 0.0
    """Mean log-probability of its tokens."""


class Forks(Branching):
    """The forks of a request for `n` outputs, or for the best `n` of `best_of`."""

    def __init__(self, root: Sequence) -> None:
        params = root.request.sampling
        self._shown = params.n or 1
        self.count = max(self._shown, params.best_of or 1)
        self._root = root
        if root.model.kv.states is not None:
            root.scheduled.width = self.count  # each will have its own state
        self._held: dict[int, _Held] = {}
        self._prompt: TokenOutput | None = None
        """The output with the prompt's logprobs and ids, which are emitted with the best output."""
        self.forked = False
        self.new: list[Sequence] = []
        """Forks that are created in the step that computes the last prompt token, and do not run yet."""

    @property
    def quiet(self) -> bool:
        """Whether no output is emitted before all forks have ended."""
        return self.count > self._shown

    @property
    def foreseeable(self) -> bool:
        return self.forked and not self.new

    def fork(self, block_size: int) -> list[Sequence]:
        """Create the forks; returns all sequences, first the one that computed the prompt. `new` holds the others."""
        root = self._root
        request = root.request
        self.forked = True
        for index in range(1, self.count):
            own = replace(
                request,
                seed=(request.seed + index) & SEED_MASK,
                resume=request.resume_others[index - 1] if index <= len(request.resume_others) else [],
                resume_others=[],
            )
            child = Sequence(own, root.model, root.rank_of(index), parent=root, number=index)
            child.index, child.branches = index, self
            child.follow(root, block_size)
            self.new.append(child)
        forks = [root, *self.new]
        root.scheduled.width = 1
        for fork in forks:
            fork.go_on(fork.request.resume)
            fork.refresh(block_size)
        return forks

    def give(self, output: TokenOutput) -> list[TokenOutput]:
        """The outputs to emit after a fork has made `output`."""
        if not self.quiet:
            return [output]
        held = self._held.setdefault(output.index, _Held(TokenOutput(output.request_id)))
        counts = TokenOutput(
            output.request_id,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=output.cached_tokens,
            modality_tokens=output.modality_tokens,
        )
        if output.prompt_logprobs or output.prompt_token_ids:
            self._prompt = output
        held.output.token_ids += output.token_ids
        held.output.codes += output.codes
        held.output.logprobs += output.logprobs
        held.output.text += output.text
        if output.finished:
            assert output.cumulative_logprob is not None
            held.output.finished = True
            held.output.finish_reason, held.output.stop_reason = output.finish_reason, output.stop_reason
            held.output.cumulative_logprob = output.cumulative_logprob
            held.score = output.cumulative_logprob / len(held.output.token_ids)
        over = len(self._held) == self.count and all(one.output.finished for one in self._held.values())
        return ([counts] if output.prompt_tokens else []) + (self._best() if over else [])

    def _best(self) -> list[TokenOutput]:
        # the first of equals, so that the choice does not depend on which ended first
        ranked = sorted(self._held, key=lambda index: (-self._held[index].score, index))
        best = [self._held[index].output for index in ranked[: self._shown]]
        first, *others = (replace(output, index=index) for index, output in enumerate(best))
        if self._prompt is not None:
            first.prompt_logprobs = self._prompt.prompt_logprobs
            first.prompt_token_ids = self._prompt.prompt_token_ids
        return [first, *others]


def scored(sequences: Seq[Sequence]) -> list[int]:
    """Indices of the sequences whose tokens' log-probabilities decide which outputs are emitted."""
    return [
        place
        for place, sequence in enumerate(sequences)
        if isinstance(sequence.branches, Forks) and sequence.branches.quiet
    ]
