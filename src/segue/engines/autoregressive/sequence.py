"""State of one request inside the engine: its known tokens, its next inputs, and the output it has emitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from segue.engines.autoregressive.cache.blocks import block_hash, chain_root
from segue.engines.autoregressive.contract import AutoregressiveModel, EndsByRow, Fed, Prompt, Then
from segue.engines.autoregressive.grammar.after_thoughts import AfterThoughts
from segue.engines.autoregressive.grammar.grammar import Compilation, Form
from segue.engines.autoregressive.hold import Conditioning, Pieces, check_open, check_prompt
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.autoregressive.sample.detokenize import TextOutput
from segue.engines.autoregressive.sample.logprobs import output_wanted, prompt_wanted
from segue.engines.autoregressive.sample.penalties import bad_words
from segue.engines.autoregressive.sample.sampler import RowSampler
from segue.engines.autoregressive.sample.thinking import Thinking, marks_of
from segue.engines.autoregressive.schedule.bidirectional import around
from segue.engines.autoregressive.schedule.decision import ScheduledSequence
from segue.engines.autoregressive.schedule.policies import Rank
from segue.engines.contract import StageRequest
from segue.messages.errors import InvalidRequest, StageFailed, TooLong
from segue.messages.sampling import turn_seed
from segue.messages.units import TurnEnd, Unit, ids_of, rows_of


class Branching:
    """Base of the state of a request with several outputs or candidates: `Forks` or a `BeamGroup`."""

    @property
    def foreseeable(self) -> bool:
        """Whether its sequences continue unchanged, whatever tokens a step gives them."""
        return False


class Sequence:
    """A request from `add` to its end. Its `scheduled` is the scheduler's view of it."""

    def __init__(
        self,
        request: StageRequest,
        model: AutoregressiveModel,
        rank: Rank,
        *,
        parent: Sequence | None = None,
        number: int = 0,
    ) -> None:
        """`parent`: the sequence of the same request that this one continues; `number`: its number among them."""
        self.request = request
        self.model = model
        self.state: Any = model.begin(request) if parent is None else parent.state
        self._root = parent is None
        self.index = 0
        """Index of the output it makes."""
        self.branches: Branching | None = None
        """Shared state of the request's sequences if it has several outputs or candidates."""
        key = request.request_id if parent is None else f"{request.request_id}\0{number}"
        self.scheduled = ScheduledSequence(key, rank, tenant=request.request.tenant, share=request.request.share)
        kept = model.kv.states
        self.scheduled.entire = kept is not None and not kept.continues
        self.input = Pieces(model.axes)
        self.prompt_length = 0
        """Tokens before the units of the current turn: the prompt, if it has one piece."""
        self.ids: list[int] = []
        """Tokens of the input and generated ones."""
        self._queue: deque[tuple[Prompt, Then]] = deque()
        """Pieces that arrived while a turn drew, and what follows each."""
        self.then = Then.END
        """What follows the last piece."""
        self.holds = False
        """It does not draw before more input arrives; its newest token is not computed."""
        self._longest = 0
        """The most tokens it can have."""
        self.kept = False
        """It holds after the end of its request."""
        self.turns: list[TurnEnd] = []
        """The turns that have ended."""
        self._known = deque(request.turns if parent is None else [])
        """The ends of the turns of an earlier attempt that are not repeated yet."""
        self.emitted = 0
        """Units emitted so far."""
        self.counted = 0
        """Input tokens reported so far."""
        self.to_emit: list[tuple[list[Unit], TurnEnd | None]] = []
        """Units of an earlier attempt for its next output, by turn; with the end of the turn if it is over."""
        self.drafts: list[int] = []
        """Draft tokens after `ids`, to be verified in its next step."""
        self.wary = False
        """Its last step gave NaN with drafts: the next step runs without drafts."""
        self.forced: int | None = None
        """The last token of an earlier attempt: taken instead of sampling one."""
        self.forced_row: list[int] = []
        """Its row, if the stage model yields rows of codes."""
        self.conditioning = Conditioning()
        self.sampler: RowSampler | None = None
        sampling = request.sampling
        spoken = "text" in request.to_client and sampling.detokenize is not False
        self._texts = spoken or bool(sampling.stop)
        self.text = TextOutput(model, request) if self._texts else None
        self.logprobs = output_wanted(sampling, model.vocab_size)
        self._start: Form | None = None if parent is None else parent._start
        self.grammar: Form | None = None
        """Position of its text in the required grammar."""
        self.compiling: Compilation | None = None
        """The grammar it waits for; it does not run until this is done."""
        self.words = bad_words(request, model.vocabulary, model.vocab_size)
        self._marks = marks_of(request, model.vocabulary, model.vocab_size)
        # an earlier attempt that had emitted a token had sent the prompt's logprobs with it
        reported = bool(request.resume) or parent is not None
        self.prompt_logprobs = None if reported else prompt_wanted(sampling, model.vocab_size)
        self.scheduled.fresh = self.prompt_logprobs is not None
        self.min_tokens = sampling.min_tokens or 0
        self.most = 0
        """Most tokens it may generate; set with the prompt."""
        ends = frozenset() if sampling.ignore_eos else model.end_token_ids
        self.end_ids = ends | frozenset(sampling.stop_token_ids or ())
        self._ends_by = model.ends if isinstance(model, EndsByRow) and not sampling.ignore_eos else None
        self.rows_given = 0
        """Captured rows of tokens [0, rows_given) have been emitted."""
        self.wants_rows = bool(request.downstreams) and model.kv.capture_width > 0
        self.shareable = True
        self.logprob = 0.0
        """Summed log-probability of its generated tokens, if requested."""
        self._unused: deque[int] = deque()
        """For each chunk whose rows are unused: the cumulative number of rows up to and including that chunk."""

    def ends_by(self, row: Seq[int]) -> bool:
        """Whether the output ends with this row of codes, whatever its code 0."""
        return self._ends_by is not None and self._ends_by(row)

    def rank_of(self, number: int) -> Rank:
        """Rank of the `number`-th sequence that continues this one: directly after it."""
        priority, arrival, serial = self.scheduled.rank
        return (priority, arrival, serial + number)

    @property
    def prompt(self) -> Prompt | None:
        """The last piece of the input; None if there is none yet."""
        return self.input.last.prompt if len(self.input) else None

    @property
    def codes(self) -> list[list[int]]:
        """The row of each unit of this turn, if the stage model yields rows of codes; their codes 0 are in `ids`."""
        return self.input.last.codes

    @property
    def generated(self) -> int:
        """Units of this turn."""
        return len(self.ids) - self.prompt_length

    @property
    def over(self) -> bool:
        """Whether nothing is left to draw, because the input was closed after a turn."""
        return self.holds and self.then is Then.END

    @property
    def keeps(self) -> bool:
        """Whether it holds its blocks after the end of its request. One that is conditioned on rows does not: another
        request has other rows, and would not find them."""
        return bool(self.request.request.keep) and self.branches is None and not self.model.conditioned

    def keep(self, key: str, end: TurnEnd, block_size: int) -> None:
        """Hold after the end of its request, by the name of `key`: as after a turn, but nothing more comes."""
        self.request = replace(self.request, request_id=key)
        self.scheduled.key = key
        self.scheduled.paused = False
        self.then = Then.TURN
        self.turns.append(end)
        self.holds = self.kept = True
        self.propose([])
        self.refresh(block_size)
        self.input.shed()

    @property
    def reported(self) -> bool:
        """Whether all that is known of it was emitted, rows of all tokens but the newest included."""
        return not self.to_emit and (not self.wants_rows or self.rows_given >= len(self.ids) - 1)

    @property
    def last_end(self) -> tuple[str, int | str | None]:
        """`finish_reason` and `stop_reason` of the last turn."""
        return self.turns[-1].finish_reason, self.turns[-1].stop_reason

    @property
    def restricted(self) -> bool:
        """Whether tokens may be forbidden, so that possibly none is left."""
        return self.grammar is not None or (self.sampler is not None and self.sampler.rules.forbids)

    @property
    def foreseeable(self) -> bool:
        """Whether its next step's computation and sampling are independent of the token that this step draws."""
        if self.grammar is not None or self.forced is not None or self.prompt_logprobs is not None:
            return False
        rules = None if self.sampler is None else self.sampler.rules
        return (rules is None or not rules.remember) and (self.branches is None or self.branches.foreseeable)

    def take_grammar(self, start: Form) -> None:
        """Take the compiled grammar and advance it over the tokens of an earlier attempt."""
        self.compiling, self._start = None, start
        if self.sampler is not None:
            self._take_form()

    def _take_form(self) -> None:
        """Start the grammar once both it and the piece after which the sequence draws have arrived."""
        assert self.sampler is not None
        for resumed in (self.request.resume, *self.request.resume_others):
            place = self._form()
            if place is not None and not all(place.accept(token) for token in ids_of(resumed)):
                raise StageFailed("the tokens of an earlier attempt do not match structured_outputs")
        thinking = self._thinking()
        known = ids_of(self.request.resume)
        self.sampler.rules.thinking = None if thinking is None else thinking.after(known[:-1])
        self._replay(known)

    def _thinking(self) -> Thinking | None:
        """The thinking state of an output that has no token yet."""
        marks = self._marks
        if marks is None or self.prompt is None:
            return None
        if marks.may_open and self._start is not None and self._start.fork().accept(marks.open[0]):
            marks = replace(marks, may_open=False)  # the grammar's own text can begin with this token
        return Thinking(marks, self.ids[: self.prompt_length])

    def _form(self) -> Form | None:
        """The grammar state of an output that has no token yet."""
        if self._start is None or self._marks is None:
            return None if self._start is None else self._start.fork()
        thinking = self._thinking()
        return None if thinking is None else AfterThoughts(self._start.fork(), thinking, self.end_ids)

    def _replay(self, resume: Seq[int]) -> None:
        """Advance the grammar over an earlier attempt's tokens, except the last, which is accepted when it is taken."""
        self.grammar = self._form()
        if self.grammar is not None:
            for token in resume[:-1]:
                self.grammar.accept(token)

    def feed(self, fed: Fed, longest: int, block_size: int) -> None:
        """Take the result of a chunk. `longest`: the most tokens a sequence can have; `block_size` 0: no sharing.

        Raises `InvalidRequest` for a prompt that can never run.
        """
        if fed.conditioning is not None:
            self.conditioning.add(fed.conditioning)
            self._unused.append(self.conditioning.count)
        if fed.tail is not None:
            self.conditioning.tail = fed.tail
        if fed.prompt is not None and fed.prompt.reply:
            self._give(fed.prompt, longest)
        if fed.prompt is not None:
            # of a request that returns, more may belong to this visit: `end_input` says when it is complete
            self._take(fed.prompt, Then.HOLD if self.request.returns else fed.then, longest)
        elif fed.closed and not self.request.returns:
            self._close(Then.END)
        self.scheduled.parked, self.scheduled.since = False, None
        self.refresh(block_size)

    def end_input(self, then: Then, block_size: int) -> None:
        """Take the end of the input: of this visit (`Then.TURN`), or of the request (`Then.END`). Raises
        `InvalidRequest` if there is none."""
        self._close(then)
        self.scheduled.parked, self.scheduled.since = False, None
        self.refresh(block_size)

    def _give(self, prompt: Prompt, longest: int) -> None:
        """Take the reply of a prompt as that of an earlier attempt, whatever part of it one had emitted. Raises
        `TooLong`."""
        if len(prompt.token_ids) + len(prompt.reply) > longest:
            raise TooLong(
                f"the prompt has {len(prompt.token_ids)} tokens and the reply it asks for {len(prompt.reply)}; "
                f"together they may have at most {longest}",
                field="messages",
            )
        unbounded = msgspec.structs.replace(self.request.sampling, max_tokens=None)
        self.request = replace(self.request, resume=list(prompt.reply), sampling=unbounded)

    def backlog(self) -> int:
        """Number of chunks that wait: with unused rows (a row is used once the token after its own has been generated),
        or with a piece of the input."""
        while self._unused and self._unused[0] <= self.generated:
            self._unused.popleft()
        return len(self._queue) + (len(self._unused) if len(self.input) else 0)

    def _take(self, prompt: Prompt, then: Then, longest: int) -> None:
        """Take a piece of the input, or queue it while a turn draws."""
        if len(self.input) and (self._queue[-1][1] if self._queue else self.then) is Then.END:
            raise StageFailed("a piece of input came after the last one", stage=self.request.stage)
        if self.model.conditioned and (len(self.input) or then is not Then.END):
            raise StageFailed("a stage that is conditioned on rows takes one prompt", stage=self.request.stage)
        check_open(self.request.stage, self.request.sampling, then)
        self._longest = min(self._longest, longest) if len(self.input) else longest
        if len(self.input) and not self.holds:
            self._queue.append((prompt, then))
        else:
            self._begin(prompt, then)

    def _close(self, then: Then) -> None:
        """Take the end of the input: `then` follows the last piece."""
        if self._queue:
            self._queue[-1] = (self._queue[-1][0], then)
        elif not len(self.input):
            raise InvalidRequest("the input was closed without a token; append at least one", field="append")
        elif self.then is Then.HOLD:
            check_open(self.request.stage, self.request.sampling, then)
            self.then, self.holds = then, False
            self._begin_turn()
        elif then is Then.TURN:
            raise StageFailed("a visit of a held sequence got no input to append", stage=self.request.stage)
        else:
            self.then = then

    def _begin(self, prompt: Prompt, then: Then) -> None:
        """Add a piece to the known tokens, and begin to draw after it unless the sequence is to hold."""
        stage, start = self.request.stage, len(self.ids)
        length = start + len(prompt.token_ids)
        if not prompt.token_ids:
            raise InvalidRequest("the prompt is empty; send at least one token", field="messages")
        if length + 1 > self._longest:
            begun = f"the input has {length} tokens with all that was generated for it" if start else None
            raise TooLong(
                f"{begun or f'the prompt has {length} tokens'}; with one for the reply that is more than the "
                f"{self._longest} this deployment can hold for a request at stage {stage!r}",
                field="append" if start else "messages",
            )
        check_prompt(prompt, self.model.axes, stage)
        self.input.add(prompt, start)
        self.ids += prompt.token_ids
        self.prompt_length = length
        self.scheduled.bidirectional += tuple((start + first, start + last) for first, last in prompt.bidirectional)
        self.scheduled.appended += length - start if start else 0
        self.shareable = self.shareable and (prompt.identity is None or bool(prompt.identity))
        self.then, self.holds = then, then in (Then.HOLD, Then.LEND)
        self.scheduled.lent = then is Then.LEND
        if not self.holds:
            self._begin_turn()

    def _begin_turn(self) -> None:
        """Begin to draw. Tokens of an earlier attempt are taken instead of drawn."""
        model, request, prompt = self.model, self.request, self.input.last.prompt
        self.most = self._longest - self.prompt_length
        if request.sampling.max_tokens is not None:
            self.most = min(self.most, request.sampling.max_tokens)
        turn = len(self.turns)
        if turn and self._texts:
            self.text = TextOutput(model, request)
        self.logprob = 0.0
        begin = self.turns[-1].units if turn else 0
        resume = request.resume[begin:]
        if self._known and request.returns:
            # taken like those of a turn that has not ended, so that all its rows are given before it ends once more
            resume = request.resume[begin : self._known.popleft().units]
        elif self._known:
            self._repeat(self._known.popleft(), resume)
            return
        self.sampler = RowSampler.of(
            request.sampling,
            turn_seed(request.seed, turn),
            self.ids[: self.prompt_length],
            model.vocab_size,
            model.end_token_ids,
            self.words,
            self._thinking(),
            prompt.rule,
        )
        if self.branches is None:
            self.go_on(resume)
        if self._start is not None and self._root:
            self._take_form()

    def _repeat(self, end: TurnEnd, resume: Seq[Unit]) -> None:
        """Take all units of a turn that ended in an earlier attempt. `resume`: its units, and those after it."""
        units = list(resume[: end.units - (self.turns[-1].units if self.turns else 0)])
        self.ids += ids_of(units)
        self.input.last.codes += rows_of(units)
        self.to_emit.append((units, end))
        self.end_turn(end)

    def end_turn(self, end: TurnEnd) -> None:
        """Hold after a turn, or go on with the next pieces if they have arrived. Raises `TooLong` for one of them."""
        self.turns.append(end)
        self.holds = True
        while self._queue and self.holds:
            self._begin(*self._queue.popleft())

    def go_on(self, resume: Seq[Unit]) -> None:
        """Take the tokens of an earlier attempt, except the last, which is taken as if it were sampled."""
        assert self.sampler is not None
        known, rows = ids_of(resume), rows_of(resume)
        self.ids += known[:-1]
        self.input.last.codes += rows[:-1]
        self.to_emit.append((list(resume[:-1]), None))
        for token in known[:-1]:
            self.sampler.saw(token)
        self.forced = known[-1] if known else None
        self.forced_row = rows[-1] if rows else []
        self._replay(known)

    def follow(self, parent: Sequence, block_size: int) -> None:
        """Continue from the end of the prompt of `parent`, which both sequences share."""
        assert parent.prompt is not None
        self.shareable = parent.shareable
        self._take(parent.prompt, Then.END, parent.most + parent.prompt_length)
        self.scheduled.hashes = parent.scheduled.hashes[:]
        self.scheduled.paused = parent.scheduled.paused
        self.refresh(block_size)

    def tell_prompt(self, output: TokenOutput) -> None:
        """Attach the requested prompt logprobs and ids to the output with the request's first token."""
        gathered, request = self.prompt_logprobs, self.request
        if gathered is not None:
            output.prompt_logprobs = gathered.found
            self.prompt_logprobs, self.scheduled.fresh = None, False
        if request.request.return_prompt_ids and "text" in request.to_client:
            ids = self.ids[: self.prompt_length]
            # prompts given as embeddings have no ids
            output.prompt_token_ids = ids if min(ids, default=0) >= 0 else []

    def become(self, other: Sequence) -> None:
        """Replace its tokens with those of `other`, which has the same prompt."""
        assert self.sampler is not None
        assert other.sampler is not None
        self.ids = other.ids[:]
        self.shareable = other.shareable
        self.grammar = None if other.grammar is None else other.grammar.fork()
        self.sampler.rules.have_seen(other.sampler.rules)
        self.scheduled.hashes = other.scheduled.hashes[:]

    def cut(self, ids: list[int], block_size: int) -> None:
        """Set its tokens to `ids`, which begin with the prompt; none of them is in the cache."""
        self.ids = ids
        self.scheduled.hashes = []
        self.refresh(block_size)

    def append(self, token: int, block_size: int, row: Seq[list[int]] = ()) -> None:
        """Append one generated token. `row`: its row of codes, if it has one."""
        assert self.sampler is not None
        self.ids.append(token)
        self.input.last.codes += row
        self.sampler.saw(token)
        self.forced, self.forced_row = None, []
        self.wary = False
        self.propose([])
        self.refresh(block_size)

    def propose(self, drafts: list[int]) -> None:
        """Set the draft tokens; they are valid until the next token is appended."""
        self.drafts = drafts
        self.scheduled.drafts = len(drafts)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of tokens [start, stop), including drafts."""
        known = self.ids[start:stop]
        after = len(self.ids)
        return known + self.drafts[max(0, start - after) : stop - after] if stop > after else known

    def expect(self, block_size: int) -> None:
        """Advance as if the token that is being drawn were known, unless it is the last one in any case, or of a turn
        that has ended."""
        if self.generated + 1 < self.most and not self.holds:
            self.refresh(block_size, coming=1)

    def refresh(self, block_size: int, *, coming: int = 0) -> None:
        """Update `scheduled` after tokens or rows arrived. `coming`: tokens assumed to be known already."""
        if not len(self.input):
            return
        scheduled = self.scheduled
        scheduled.length = scheduled.ready = len(self.ids) + coming
        scheduled.open = self.holds
        if self.compiling is not None:
            scheduled.ready = 0
            return
        if self.holds:
            scheduled.ready = around(scheduled.bidirectional, scheduled.length - 1)[0]
        shared = len(self.ids)
        if self.model.conditioned:
            # a generated token's identity depends on its row, so only the prompt is shared
            shared = self.prompt_length
            if self.conditioning.tail is None:
                scheduled.ready = min(scheduled.length, self.prompt_length + self.conditioning.count)
                scheduled.open = self.request.request.open
        if block_size and self.shareable:
            while (len(scheduled.hashes) + 1) * block_size <= shared:
                start = len(scheduled.hashes) * block_size
                parent = scheduled.hashes[-1] if scheduled.hashes else chain_root(self.request.request.cache_salt)
                identity = self.input.identity(start, start + block_size, self.ids)
                scheduled.hashes.append(block_hash(parent, identity))

    def positions(self, start: int, stop: int) -> np.ndarray:
        """[axes, stop - start] int64."""
        return self.input.positions(start, stop)
