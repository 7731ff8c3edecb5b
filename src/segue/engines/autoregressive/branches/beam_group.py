"""The beams of one request as sequences: they share blocks, are dropped and copied in each step, and run together.

    prompt ─▶ one sequence ─▶ `width` beams, step by step ─▶ the best that have ended
                  ▲                      │
                  ╰──── preempted ───────╯

Beams are preempted together. They return as one sequence with their common prefix; when that is computed, it is forked
into the beams again, and each computes its own remaining tokens. So a search that once fitted into the pool still does,
whatever the prefix cache has evicted.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import takewhile

import torch

from segue.engines.autoregressive.branches.beam_search import BeamLogprobs, BeamSearch, End, Step
from segue.engines.autoregressive.grammar.grammar import Form, GrammarRows, apply_grammars
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.autoregressive.sample.detokenize import TextOutput
from segue.engines.autoregressive.sample.penalties import apply_rules
from segue.engines.autoregressive.schedule.bidirectional import longest_of
from segue.engines.autoregressive.schedule.decision import Limits
from segue.engines.autoregressive.sequence import Branching, Sequence
from segue.engines.autoregressive.step.active import ActiveSequences
from segue.messages.errors import InvalidRequest, StageFailed, TooLong


class BeamGroup(Branching):
    """A beam search. Active is either its root (the prompt, or the beams' common prefix), or its beams."""

    def __init__(self, root: Sequence) -> None:
        params = root.request.sampling
        assert params.beam_width is not None
        self.root = root
        self.width = params.beam_width
        self._shown = params.n or 1
        self.beams: list[Sequence] = []
        """Best first; empty before the prompt is computed."""
        self._search = BeamSearch(
            self.width,
            max(2, 1 + len(root.end_ids)) * self.width,
            length_penalty=1.0 if params.length_penalty is None else params.length_penalty,
            early_stopping=bool(params.early_stopping),
        )
        root.scheduled.width = self.width
        wanted = root.logprobs
        self._likely = None if wanted is None else BeamLogprobs(wanted, root.model.vocabulary)
        self._picked = False
        self._finite = True
        self._step: Step | None = None

    def limit(self, num_blocks: int, limits: Limits) -> None:
        """Check, once the prompt has arrived, that the search fits into the pool at its end, when its beams share only
        the prompt. Raises `TooLong`."""
        root, size = self.root, limits.block_size
        at_once = longest_of(root.scheduled.spans)

        def blocks(tokens: int) -> int:
            length = root.prompt_length + tokens
            shared = root.prompt_length // size  # in groups with full attention
            return sum(
                shared + self.width * (limits.blocks(length) - shared) if window is None else self.width * least
                for window, least in zip(limits.windows, limits.least(length, at_once), strict=True)
            )

        fit = bisect_right(range(root.most + 1), num_blocks, key=blocks) - 1
        if fit < (root.most if root.request.sampling.max_tokens is not None else 1):
            raise TooLong(
                f"{self.width} beams of {root.most} tokens after a prompt of {root.prompt_length} do not fit into the "
                f"{num_blocks * size} tokens that stage {root.request.stage!r} can hold; give fewer beams or a "
                f"lower max_tokens",
                field=f"sampling.{root.request.stage}.beam_width",
            )
        root.most = fit

    def pick(self, logits: torch.Tensor) -> None:
        """Choose the next beams. `logits` [width, vocab] float32, best beam first; one row after the prompt."""
        beams = self.beams or [self.root] * self.width
        log_probs = logits.log_softmax(dim=-1)
        if len(log_probs) < self.width:
            log_probs = log_probs.repeat(self.width, 1)
        self._picked, self._finite = True, bool(torch.isfinite(logits.sum(dim=-1)).all())
        if not self._finite:
            return
        rules = [beam.sampler.rules for beam in beams if beam.sampler is not None]
        if not all(rule.plain for rule in rules):
            apply_rules(log_probs, rules, [beam.generated for beam in beams])
        _hold(log_probs, beams)
        generated = [beam.ids[beam.prompt_length :] for beam in beams]
        self._step = self._search.step(
            log_probs, generated, lambda beam, token: self._end(beams[beam], [*generated[beam], token])
        )
        if self._likely is not None:
            before = [tuple(ids) for ids in generated]
            step = self._step or Step([], [])
            going = [(*before[beam], token) for beam, token in zip(step.parents, step.tokens, strict=True)]
            ended = [one.token_ids for one in self._search.best(self.width)]
            self._likely.step(logits, before, [*going, *ended])

    def advance(self, active: ActiveSequences, block_size: int) -> list[TokenOutput]:
        """After a step that computed sequences of this group: apply the choice, or continue catching up."""
        if self._picked and not self._finite:
            raise StageFailed("the model gave NaN or infinity for this request", stage=self.root.request.stage)
        if self._picked and self._step is None:
            return self._finish(active)
        if self._picked:
            assert self._step is not None
            self._take(self._step, active, block_size)
        elif self.root in active and self.beams and self.root.scheduled.computed == self.root.scheduled.length:
            for beam in self.beams:
                beam.scheduled.paused = self.root.scheduled.paused
                active.fork(self.root, beam)
            active.remove(self.root)
        self._picked = False
        self._set_ready()
        return []

    def put_aside(self, active: ActiveSequences, block_size: int) -> None:
        """Handle the preemption of the beams: wait as one sequence of their common prefix, without each beam's last
        token, which is yet to be computed."""
        first, *others = (beam.ids[:-1] for beam in self.beams)
        common = sum(1 for _ in takewhile(lambda place: len(set(place)) == 1, zip(first, *others, strict=True)))
        self.root.scheduled.paused = self.beams[0].scheduled.paused
        for beam in self.beams:
            active.remove(beam)
        self.root.cut(first[:common], block_size)
        # its beams were charged for these tokens
        self.root.scheduled.charged = max(self.root.scheduled.charged, common + 1)
        active.add(self.root)

    def _take(self, step: Step, active: ActiveSequences, block_size: int) -> None:
        """Form the next beams: a beam's first child keeps its sequence, further children replace dropped beams."""
        if not self.beams:
            self._branch(active, block_size)
        parents = [self.beams[place] for place in step.parents]
        dropped = [beam for beam in self.beams if beam not in parents]
        following: list[Sequence] = []
        for parent in parents:
            beam = parent
            if parent in following:
                beam = dropped.pop()
                beam.become(parent)
                active.replace(beam, parent)
            following.append(beam)
        self.beams = following
        for beam, token in zip(following, step.tokens, strict=True):
            beam.append(token, block_size)
            if beam.grammar is not None:
                beam.grammar.accept(token)  # may fail for a beam with score -inf, which is about to be dropped

    def _branch(self, active: ActiveSequences, block_size: int) -> None:
        root = self.root
        for number in range(1, self.width + 1):
            beam = Sequence(root.request, root.model, root.rank_of(number), parent=root, number=number)
            beam.branches = self
            beam.follow(root, block_size)
            beam.counted = root.counted
            beam.grammar = None if root.grammar is None else root.grammar.fork()
            active.fork(root, beam)
            self.beams.append(beam)
        root.scheduled.fresh = False  # the prompt's logprobs are complete
        beam_group = [beam.scheduled for beam in self.beams]
        for scheduled in beam_group:
            scheduled.beam_group = beam_group
        active.remove(root)

    def _set_ready(self) -> None:
        """Hold back each beam's last token until all beams have computed the tokens before it."""
        for beam in self.beams:
            beam.scheduled.ready = beam.scheduled.length - 1
        if all(beam.scheduled.computed == beam.scheduled.ready for beam in self.beams):
            for beam in self.beams:
                beam.scheduled.ready = beam.scheduled.length

    def _end(self, beam: Sequence, generated: list[int]) -> End | None:
        """Why `beam` ends with these tokens, of which it has all but the last; None if it continues."""
        root, params = self.root, self.root.request.sampling
        token = generated[-1]
        if token in root.end_ids:
            return End("stop", token if token in (params.stop_token_ids or ()) else None)
        if beam.grammar is not None and _completes(beam.grammar, token):
            return End("stop")
        if params.stop and len(generated) >= root.min_tokens and (stop := self._stop_string(generated)):
            return End("stop", stop)
        return End("length") if len(generated) >= root.most else None

    def _stop_string(self, generated: list[int]) -> str | None:
        """The stop string that completes first in the text of the tokens that may stop."""
        params, decode = self.root.request.sampling, self.root.model.decode_text
        skip = params.skip_special_tokens is not False
        text = decode(generated, skip_special_tokens=skip)
        before = generated[: max(0, self.root.min_tokens - 1)]
        text = text[len(decode(before, skip_special_tokens=skip)) :]
        found = [(at + len(stop), at, stop) for stop in params.stop or () if (at := text.find(stop)) >= 0]
        return min(found)[2] if found else None

    def _finish(self, active: ActiveSequences) -> list[TokenOutput]:
        request = self.root.request
        best = self._search.best(self._shown)
        if len(best) < self._shown:
            raise InvalidRequest(
                f"the sampling constraints of stage {request.stage!r} leave {len(best)} outputs of {self._shown}; "
                "see its allowed_token_ids, suppress_tokens, bad_words, min_tokens and structured_outputs",
                field=f"sampling.{request.stage}",
            )
        for sequence in active.of(request.request_id):
            active.remove(sequence)
        outputs = [
            TokenOutput(
                request.request_id,
                token_ids=list(ended.token_ids),
                text=self._text(ended.token_ids),
                index=index,
                finished=True,
                finish_reason=ended.end.reason,
                stop_reason=ended.end.stop_reason,
                cumulative_logprob=ended.logprob,
                logprobs=[] if self._likely is None else self._likely.of(ended.token_ids),
            )
            for index, ended in enumerate(best)
        ]
        self.root.tell_prompt(outputs[0])
        return outputs

    def _text(self, token_ids: tuple[int, ...]) -> str:
        root = self.root
        if root.text is None:
            return ""
        output, text, found = TextOutput(root.model, root.request), "", False
        for count, token in enumerate(token_ids, 1):
            piece, found = output.push(token, ends=token in root.end_ids, may_stop=count >= root.min_tokens)
            text += piece
        return text if found else text + output.flush(may_stop=len(token_ids) >= root.min_tokens)


def _hold(log_probs: torch.Tensor, beams: list[Sequence]) -> None:
    """Set tokens that the grammar forbids after each beam to -inf, in `log_probs` [width, vocab]."""
    held = [(row, beam.grammar) for row, beam in enumerate(beams) if beam.grammar is not None]
    apply_grammars(log_probs, [GrammarRows(grammar, row) for row, grammar in held if not grammar.over])
    for row, grammar in held:
        if grammar.over:  # a placeholder beam, which must not continue
            log_probs[row] = float("-inf")


def _completes(grammar: Form, token: int) -> bool:
    """Whether this token completes the text."""
    if grammar.over or not grammar.accept(token):
        return False
    complete = grammar.over or grammar.exhausted
    grammar.rollback(1)
    return complete
