"""State of one request inside the engine: its known tokens, its next inputs, and the output it has emitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from segue.engines.autoregressive.cache.blocks import block_hash, chain_root
from segue.engines.autoregressive.contract import AutoregressiveModel, EndsByRow, Fed, Prompt, row_identity
from segue.engines.autoregressive.grammar.after_thoughts import AfterThoughts
from segue.engines.autoregressive.grammar.grammar import Compilation, Form, Grammar
from segue.engines.autoregressive.sample.detokenize import Detokenizer, StopStrings
from segue.engines.autoregressive.sample.logprobs import output_wanted, prompt_wanted
from segue.engines.autoregressive.sample.penalties import bad_words
from segue.engines.autoregressive.sample.sampler import RowSampler
from segue.engines.autoregressive.sample.thinking import Thinking, marks_of
from segue.engines.autoregressive.schedule.bidirectional import check_bidirectional
from segue.engines.autoregressive.schedule.jobs import Job
from segue.engines.autoregressive.schedule.policies import Rank
from segue.engines.contract import StageOutput, StageRequest
from segue.messages.errors import InvalidRequest, StageFailed, TooLong
from segue.messages.units import Unit, ids_of, rows_of


class Branching:
    """Base of the state of a request with several outputs or candidates: `Forks` or a `BeamGroup`."""

    @property
    def foreseeable(self) -> bool:
        """Whether its sequences continue unchanged, whatever tokens a step gives them."""
        return False


class Conditioning:
    """Rows from upstream for generated tokens: row k belongs to token k, the tail to all tokens after the last row."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self.count = 0
        self.tail: torch.Tensor | None = None

    def add(self, rows: torch.Tensor) -> None:
        """Append [n, width] rows."""
        if self._rows is None or self.count + len(rows) > len(self._rows):
            grown = rows.new_empty(max(64, 2 * (self.count + len(rows))), rows.shape[1])
            if self._rows is not None:
                grown[: self.count] = self._rows[: self.count]
            self._rows = grown
        self._rows[self.count : self.count + len(rows)] = rows
        self.count += len(rows)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, width]; the caller has checked that the rows have arrived."""
        given = min(stop, self.count)
        known = [] if self._rows is None or start >= given else [self._rows[start:given]]
        if stop > given:
            assert self.tail is not None, f"rows [{start}, {stop}) wanted, but only {self.count} have arrived"
            known.append(self.tail.expand(stop - max(start, given), -1))
        return known[0] if len(known) == 1 else torch.cat(known)


class TextOutput:
    """Detokenises and searches for stop strings. Raises `InvalidRequest` for stages without text."""

    def __init__(self, model: AutoregressiveModel, request: StageRequest) -> None:
        sampling = request.sampling
        skip = sampling.skip_special_tokens is not False
        self._wanted = "text" in request.to_client
        try:
            model.decode_text([], skip_special_tokens=True)
        except StageFailed as error:
            field = f"sampling.{request.stage}.stop"
            raise InvalidRequest(f"{field} is set, but stage {request.stage!r} makes no text", field=field) from error
        self._include = bool(sampling.include_stop_str_in_output)
        self._detokenizer = Detokenizer(lambda ids: model.decode_text(ids, skip_special_tokens=skip))
        self._stops = StopStrings(sampling.stop or (), include=self._include)

    def push(self, token: int, *, ends: bool, may_stop: bool) -> tuple[str, bool]:
        """Returns (new text, whether a stop string was found). `ends`: the token ends the output and shows no text."""
        if ends and not self._include:
            return "", False
        text, found = self._stops.push(self._detokenizer.push(token), may_stop=may_stop)
        return (text if self._wanted else ""), found

    @property
    def found(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def flush(self, *, may_stop: bool) -> str:
        """Return the text held back; the output has ended without a stop string."""
        text, found = self._stops.push(self._detokenizer.flush(), may_stop=may_stop)
        text += "" if found else self._stops.flush()
        return text if self._wanted else ""


class Sequence:
    """A request from `add` to its end. Its `job` is the scheduler's view of it."""

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
        self.job = Job(key, rank, tenant=request.request.tenant, share=request.request.share)
        kept = model.kv.states
        self.job.entire = kept is not None and not kept.continues
        self.prompt: Prompt | None = None
        self.prompt_length = 0
        self._positions: np.ndarray | None = None
        self.ids: list[int] = []
        """Prompt and generated tokens."""
        self.drafts: list[int] = []
        """Draft tokens after `ids`, to be verified in its next step."""
        self.wary = False
        """Its last step gave NaN with drafts: the next step runs without drafts."""
        self.codes: list[list[int]] = []
        """The row of each generated token, if the stage model yields rows of codes; its code 0 is in `ids`."""
        self.forced: int | None = None
        """The last token of an earlier attempt: taken instead of sampling one."""
        self.forced_row: list[int] = []
        """Its row, if the stage model yields rows of codes."""
        self.conditioning = Conditioning()
        self.sampler: RowSampler | None = None
        sampling = request.sampling
        spoken = "text" in request.to_client and sampling.detokenize is not False
        self.text = TextOutput(model, request) if spoken or sampling.stop else None
        self.logprobs = output_wanted(sampling, model.vocab_size)
        self._start: Grammar | None = None if parent is None else parent._start
        self.grammar: Form | None = None
        """Position of its text in the required grammar."""
        self.compiling: Compilation | None = None
        """The grammar it waits for; it does not run until this is done."""
        self.words = bad_words(request, model.vocabulary, model.vocab_size)
        self._marks = marks_of(request, model.vocabulary, model.vocab_size)
        # an earlier attempt that had emitted a token had sent the prompt's logprobs with it
        reported = bool(request.resume) or parent is not None
        self.prompt_logprobs = None if reported else prompt_wanted(sampling, model.vocab_size)
        self.job.fresh = self.prompt_logprobs is not None
        self.min_tokens = sampling.min_tokens or 0
        self.most = 0
        """Most tokens it may generate; set with the prompt."""
        ends = frozenset() if sampling.ignore_eos else model.end_token_ids
        self.end_ids = ends | frozenset(sampling.stop_token_ids or ())
        self._ends_by = model.ends if isinstance(model, EndsByRow) and not sampling.ignore_eos else None
        self.announced = False
        """Its first output has been emitted."""
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
        priority, arrival, serial = self.job.rank
        return (priority, arrival, serial + number)

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt_length

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

    def take_grammar(self, start: Grammar) -> None:
        """Take the compiled grammar and advance it over the tokens of an earlier attempt."""
        self.compiling, self._start = None, start
        if self.prompt is not None:
            self._take_form()

    def _take_form(self) -> None:
        """Start the grammar once both prompt and grammar have arrived."""
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
        return Thinking(marks, self.prompt.token_ids)

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
            self._begin(fed.prompt, longest)
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
        """Number of chunks with unused rows; a row is used once the token after its own has been generated."""
        while self._unused and self._unused[0] <= self.generated:
            self._unused.popleft()
        return len(self._unused) if self.prompt is not None else 0

    def _begin(self, prompt: Prompt, longest: int) -> None:
        length = len(prompt.token_ids)
        if not length:
            raise InvalidRequest("the prompt is empty; send at least one token", field="messages")
        if length + 1 > longest:
            raise TooLong(
                f"the prompt has {length} tokens; with one for the reply that is more than the {longest} this "
                f"deployment can hold for a request at stage {self.request.stage!r}",
                field="messages",
            )
        _check_prompt(prompt, self.model.axes, self.request.stage)
        self.prompt = prompt
        self.prompt_length = length
        self.job.bidirectional = tuple(prompt.bidirectional)
        self._positions = None if prompt.positions is None else prompt.positions.cpu().numpy()
        self.most = longest - length
        if self.request.sampling.max_tokens is not None:
            self.most = min(self.most, self.request.sampling.max_tokens)
        self.shareable = self.shareable and (prompt.identity is None or bool(prompt.identity))
        model, request = self.model, self.request
        self.sampler = RowSampler.of(
            request.sampling,
            request.seed,
            prompt.token_ids,
            model.vocab_size,
            model.end_token_ids,
            self.words,
            self._thinking(),
            prompt.rule,
        )
        self.ids = list(prompt.token_ids)
        if self.branches is None:
            self.go_on(request.resume)
        if self._start is not None and self._root:
            self._take_form()

    def go_on(self, resume: Seq[Unit]) -> None:
        """Take the tokens of an earlier attempt, except the last, which is taken as if it were sampled."""
        assert self.sampler is not None
        known, rows = ids_of(resume), rows_of(resume)
        self.ids += known[:-1]
        self.codes += rows[:-1]
        for token in known[:-1]:
            self.sampler.saw(token)
        self.forced = known[-1] if known else None
        self.forced_row = rows[-1] if rows else []
        self._replay(known)

    def follow(self, parent: Sequence, block_size: int) -> None:
        """Continue from the end of the prompt of `parent`, which both sequences share."""
        assert parent.prompt is not None
        self.shareable = parent.shareable
        self._begin(parent.prompt, parent.most + parent.prompt_length)
        self.job.hashes = parent.job.hashes[:]
        self.job.paused = parent.job.paused
        self.refresh(block_size)

    def tell_prompt(self, output: StageOutput) -> None:
        """Attach the requested prompt logprobs and ids to the output with the request's first token."""
        gathered, request = self.prompt_logprobs, self.request
        if gathered is not None:
            output.prompt_logprobs = gathered.found
            self.prompt_logprobs, self.job.fresh = None, False
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
        self.job.hashes = other.job.hashes[:]

    def cut(self, ids: list[int], block_size: int) -> None:
        """Set its tokens to `ids`, which begin with the prompt; none of them is in the cache."""
        self.ids = ids
        self.job.hashes = []
        self.refresh(block_size)

    def append(self, token: int, block_size: int, row: Seq[list[int]] = ()) -> None:
        """Append one generated token. `row`: its row of codes, if it has one."""
        assert self.sampler is not None
        self.ids.append(token)
        self.codes += row
        self.sampler.saw(token)
        self.forced, self.forced_row = None, []
        self.wary = False
        self.propose([])
        self.refresh(block_size)

    def propose(self, drafts: list[int]) -> None:
        """Set the draft tokens; they are valid until the next token is appended."""
        self.drafts = drafts
        self.job.drafts = len(drafts)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of tokens [start, stop), including drafts."""
        known = self.ids[start:stop]
        after = len(self.ids)
        return known + self.drafts[max(0, start - after) : stop - after] if stop > after else known

    def expect(self, block_size: int) -> None:
        """Advance as if the token that is being drawn were known, unless it is the last one in any case."""
        if self.generated + 1 < self.most:
            self.refresh(block_size, coming=1)

    def refresh(self, block_size: int, *, coming: int = 0) -> None:
        """Update `job` after tokens or rows arrived. `coming`: tokens assumed to be known already."""
        if self.prompt is None:
            return
        job = self.job
        job.length = job.ready = len(self.ids) + coming
        if self.compiling is not None:
            job.ready = 0
            return
        shared = len(self.ids)
        if self.model.conditioned:
            # a generated token's identity depends on its row, so only the prompt is shared
            shared = self.prompt_length
            if self.conditioning.tail is None:
                job.ready = min(job.length, self.prompt_length + self.conditioning.count)
        if block_size and self.shareable:
            while (len(job.hashes) + 1) * block_size <= shared:
                start = len(job.hashes) * block_size
                parent = job.hashes[-1] if job.hashes else chain_root(self.request.request.cache_salt)
                job.hashes.append(block_hash(parent, self._identity(start, start + block_size)))

    def _identity(self, start: int, stop: int) -> bytes:
        """Identity of tokens [start, stop) as bytes; equal only if K, V and captured rows are equal."""
        prompt = self.prompt
        assert prompt is not None
        known = prompt.token_ids if prompt.identity is None else prompt.identity
        begin = max(start, self.prompt_length)
        generated: Seq[int | bytes] = self.ids[begin:stop]
        if self.codes:
            rows = self.codes[begin - self.prompt_length : max(0, stop - self.prompt_length)]
            generated = [row_identity(row) for row in rows]
        items = [*known[start:stop], *generated]
        text = b"".join(b"b%d:%b" % (len(item), item) if isinstance(item, bytes) else b"i%d," % item for item in items)
        if prompt.positions is None and not prompt.position_delta:
            return text
        return text + self.positions(start, stop).tobytes()

    def positions(self, start: int, stop: int) -> np.ndarray:
        """[axes, stop - start] int64."""
        known = self._positions
        if known is not None and stop <= self.prompt_length:
            return known[:, start:stop]
        after = np.arange(start, stop)
        if self.prompt is not None and self.prompt.position_delta:
            after[max(0, self.prompt_length - start) :] += self.prompt.position_delta
        positions = np.broadcast_to(after, (self.model.axes, stop - start))
        if known is not None and start < self.prompt_length:
            positions = positions.copy()
            positions[:, : self.prompt_length - start] = known[:, start:]
        return positions


def _check_prompt(prompt: Prompt, axes: int, stage: str) -> None:
    """Reject a stage model's malformed prompt before it spoils a batch."""
    length = len(prompt.token_ids)
    if prompt.embeds is not None and prompt.embeds.shape[0] != length:
        raise StageFailed(f"prompt of {length} tokens with embeds {tuple(prompt.embeds.shape)}", stage=stage)
    if prompt.positions is not None and tuple(prompt.positions.shape) != (axes, length):
        raise StageFailed(
            f"prompt of {length} tokens with positions {tuple(prompt.positions.shape)}, not {(axes, length)}",
            stage=stage,
        )
    check_bidirectional(prompt.bidirectional, length, stage)
    if prompt.identity and len(prompt.identity) != length:
        raise StageFailed(f"prompt of {length} tokens with {len(prompt.identity)} identities", stage=stage)
