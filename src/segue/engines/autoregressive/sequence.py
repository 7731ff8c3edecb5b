"""One request inside the engine: what is known of it, what its next inputs are, what it has given out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from segue.engines.autoregressive.after_thoughts import AfterThoughts
from segue.engines.autoregressive.blocks import block_hash, chain_root
from segue.engines.autoregressive.branching import Branching
from segue.engines.autoregressive.contract import AutoregressiveAdapter, Fed, Prompt
from segue.engines.autoregressive.detokenize import Detokenizer, StopStrings
from segue.engines.autoregressive.grammar import Compilation, Form, Grammar
from segue.engines.autoregressive.jobs import Job
from segue.engines.autoregressive.logprobs import output_wanted, prompt_wanted
from segue.engines.autoregressive.mutual import check_mutual
from segue.engines.autoregressive.policies import Rank
from segue.engines.autoregressive.sampler import RowSampler
from segue.engines.autoregressive.thinking import Thinking, marks_of
from segue.engines.autoregressive.words import bad_words
from segue.engines.contract import StageOutput, StageRequest
from segue.messages.errors import InvalidRequest, StageFailed, TooLong


class Conditioning:
    """Rows from upstream for generated tokens: the k-th row goes with token k, the tail with all after the last."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None
        self.count = 0
        self.tail: torch.Tensor | None = None

    def add(self, rows: torch.Tensor) -> None:
        """[n, width] more rows."""
        if self._rows is None or self.count + len(rows) > len(self._rows):
            grown = rows.new_empty(max(64, 2 * (self.count + len(rows))), rows.shape[1])
            if self._rows is not None:
                grown[: self.count] = self._rows[: self.count]
            self._rows = grown
        self._rows[self.count : self.count + len(rows)] = rows
        self.count += len(rows)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, width]; the caller has checked that they are there."""
        given = min(stop, self.count)
        known = [] if self._rows is None or start >= given else [self._rows[start:given]]
        if stop > given:
            assert self.tail is not None, f"rows [{start}, {stop}) wanted, {self.count} are there"
            known.append(self.tail.expand(stop - max(start, given), -1))
        return known[0] if len(known) == 1 else torch.cat(known)


class TextOutput:
    """Detokenises and looks for stop strings. Raises `InvalidRequest` for stages without text."""

    def __init__(self, adapter: AutoregressiveAdapter, request: StageRequest) -> None:
        sampling = request.sampling
        skip = sampling.skip_special_tokens is not False
        self._wanted = "text" in request.to_client
        try:
            adapter.decode_text([], skip_special_tokens=True)
        except StageFailed as error:
            field = f"sampling.{request.stage}.stop"
            raise InvalidRequest(f"{field} is set, but stage {request.stage!r} makes no text", field=field) from error
        self._include = bool(sampling.include_stop_str_in_output)
        self._detokenizer = Detokenizer(lambda ids: adapter.decode_text(ids, skip_special_tokens=skip))
        self._stops = StopStrings(sampling.stop or (), include=self._include)

    def push(self, token: int, *, ends: bool, may_stop: bool) -> tuple[str, bool]:
        """(new text, whether a stop string was found). `ends`: the token itself ends the output, and shows no text."""
        if ends and not self._include:
            return "", False
        text, found = self._stops.push(self._detokenizer.push(token), may_stop=may_stop)
        return (text if self._wanted else ""), found

    @property
    def found(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def flush(self, *, may_stop: bool) -> str:
        """What was held back; the output has ended without a stop string."""
        text, found = self._stops.push(self._detokenizer.flush(), may_stop=may_stop)
        text += "" if found else self._stops.flush()
        return text if self._wanted else ""


class Sequence:
    """A request between `add` and its end. Its `job` is what the scheduler sees."""

    def __init__(
        self,
        request: StageRequest,
        adapter: AutoregressiveAdapter,
        rank: Rank,
        *,
        parent: Sequence | None = None,
        number: int = 0,
    ) -> None:
        """`parent`: the sequence of the same request that this one goes on from, and which of those it is."""
        self.request = request
        self.adapter = adapter
        self.state: Any = adapter.begin(request) if parent is None else parent.state
        self._root = parent is None
        self.index = 0
        """Which of the request's outputs it makes."""
        self.branches: Branching | None = None
        """Where the request gets several outputs, or one of several: what becomes of it."""
        key = request.request_id if parent is None else f"{request.request_id}\0{number}"
        self.job = Job(key, rank, tenant=request.request.tenant)
        kept = adapter.kv.states
        self.job.entire = kept is not None and not kept.continues
        self.prompt: Prompt | None = None
        self.prompt_length = 0
        self._positions: np.ndarray | None = None
        self.ids: list[int] = []
        """Prompt and generated tokens."""
        self.drafts: list[int] = []
        """Guesses at the tokens after `ids`, to be verified in its next step."""
        self.wary = False
        """Its last step gave NaN with drafts: the next one has none."""
        self.forced: int | None = None
        """The last token of an earlier attempt: taken instead of a drawn one."""
        self.conditioning = Conditioning()
        self.sampler: RowSampler | None = None
        sampling = request.sampling
        spoken = "text" in request.to_client and sampling.detokenize is not False
        self.text = TextOutput(adapter, request) if spoken or sampling.stop else None
        self.logprobs = output_wanted(sampling, adapter.vocab_size)
        self._start: Grammar | None = None if parent is None else parent._start
        self.grammar: Form | None = None
        """Where it is in the form its text must have."""
        self.compiling: Compilation | None = None
        """The grammar it waits for: until then it does not run."""
        self.words = bad_words(request, adapter.vocabulary, adapter.vocab_size)
        self._marks = marks_of(request, adapter.vocabulary, adapter.vocab_size)
        # an earlier attempt that had emitted a token had told of the prompt with it
        told = bool(request.resume) or parent is not None
        self.prompt_logprobs = None if told else prompt_wanted(sampling, adapter.vocab_size)
        self.job.fresh = self.prompt_logprobs is not None
        self.min_tokens = sampling.min_tokens or 0
        self.most = 0
        """How many tokens it may generate; set with the prompt."""
        ends = frozenset() if sampling.ignore_eos else adapter.end_token_ids
        self.end_ids = ends | frozenset(sampling.stop_token_ids or ())
        self.announced = False
        """Its first output is out."""
        self.rows_given = 0
        """Captured rows of tokens [0, rows_given) are out."""
        self.wants_rows = bool(request.downstreams) and adapter.kv.capture_width > 0
        self.shareable = True
        self.logprob = 0.0
        """Of its generated tokens together, where that is asked for."""
        self._unused: deque[int] = deque()
        """By chunk that brought rows nobody has used yet: the number of rows with and before it."""

    def rank_of(self, number: int) -> Rank:
        """Of the `number`-th sequence that goes on from this one: right behind it."""
        priority, arrival, serial = self.job.rank
        return (priority, arrival, serial + number)

    @property
    def generated(self) -> int:
        return len(self.ids) - self.prompt_length

    @property
    def restricted(self) -> bool:
        """Tokens may be forbidden: it can happen that none is left."""
        return self.grammar is not None or (self.sampler is not None and self.sampler.rules.forbids)

    @property
    def foreseeable(self) -> bool:
        """What its next step computes, and how a token is drawn there, does not hang on which token this one gives."""
        if self.grammar is not None or self.forced is not None or self.prompt_logprobs is not None:
            return False
        rules = None if self.sampler is None else self.sampler.rules
        return (rules is None or not rules.remember) and (self.branches is None or self.branches.foreseeable)

    def take_grammar(self, start: Grammar) -> None:
        """The grammar it waited for is there: go to where an earlier attempt had come to."""
        self.compiling, self._start = None, start
        if self.prompt is not None:
            self._take_form()

    def _take_form(self) -> None:
        """Prompt and grammar are both there."""
        assert self.sampler is not None
        for resumed in (self.request.resume, *self.request.resume_others):
            place = self._form()
            if place is not None and not all(place.accept(token) for token in resumed):
                raise StageFailed("what an earlier attempt had written does not fit structured_outputs any more")
        thinking = self._thinking()
        self.sampler.rules.thinking = None if thinking is None else thinking.after(self.request.resume[:-1])
        self._replay(self.request.resume)

    def _thinking(self) -> Thinking | None:
        """The place in its thoughts of an output that has no token yet."""
        marks = self._marks
        if marks is None or self.prompt is None:
            return None
        if marks.may_open and self._start is not None and self._start.fork().accept(marks.open[0]):
            marks = replace(marks, may_open=False)  # the form's own text can begin so
        return Thinking(marks, self.prompt.token_ids)

    def _form(self) -> Form | None:
        """The place in its form of an output that has no token yet."""
        if self._start is None or self._marks is None:
            return None if self._start is None else self._start.fork()
        thinking = self._thinking()
        return None if thinking is None else AfterThoughts(self._start.fork(), thinking, self.end_ids)

    def _replay(self, resume: Seq[int]) -> None:
        """The last of what an earlier attempt had generated is accepted when it is taken."""
        self.grammar = self._form()
        if self.grammar is not None:
            for token in resume[:-1]:
                self.grammar.accept(token)

    def feed(self, fed: Fed, longest: int, block_size: int) -> None:
        """Take what a chunk meant. `longest`: the most tokens a sequence can have; `block_size` 0: nothing is shared.

        Raises `InvalidRequest` for a prompt that can never run.
        """
        if fed.conditioning is not None:
            self.conditioning.add(fed.conditioning)
            self._unused.append(self.conditioning.count)
        if fed.tail is not None:
            self.conditioning.tail = fed.tail
        if fed.prompt is not None:
            self._begin(fed.prompt, longest)
        self.refresh(block_size)

    def backlog(self) -> int:
        """Chunks whose rows wait for their tokens; a row is used when the token after its own is there."""
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
        _check_prompt(prompt, self.adapter.axes, self.request.stage)
        self.prompt = prompt
        self.prompt_length = length
        self.job.mutual = tuple(prompt.mutual)
        self._positions = None if prompt.positions is None else prompt.positions.cpu().numpy()
        self.most = longest - length
        if self.request.sampling.max_tokens is not None:
            self.most = min(self.most, self.request.sampling.max_tokens)
        self.shareable = self.shareable and (prompt.identity is None or bool(prompt.identity))
        adapter, request = self.adapter, self.request
        self.sampler = RowSampler.of(
            request.sampling,
            request.seed,
            prompt.token_ids,
            adapter.vocab_size,
            adapter.end_token_ids,
            self.words,
            self._thinking(),
            prompt.rule,
        )
        self.ids = list(prompt.token_ids)
        if self.branches is None:
            self.go_on(request.resume)
        if self._start is not None and self._root:
            self._take_form()

    def go_on(self, resume: Seq[int]) -> None:
        """Take what an earlier attempt had generated, but for the last of it, which is taken as if it were drawn."""
        assert self.sampler is not None
        self.ids += resume[:-1]
        for token in resume[:-1]:
            self.sampler.saw(token)
        self.forced = resume[-1] if resume else None
        self._replay(resume)

    def follow(self, parent: Sequence, block_size: int) -> None:
        """Go on from where the prompt of `parent` ends, which both have."""
        assert parent.prompt is not None
        self.shareable = parent.shareable
        self._begin(parent.prompt, parent.most + parent.prompt_length)
        self.job.hashes = parent.job.hashes[:]
        self.job.paused = parent.job.paused
        self.refresh(block_size)

    def tell_prompt(self, output: StageOutput) -> None:
        """What the client asked to know of the prompt goes with the first token ever."""
        told, request = self.prompt_logprobs, self.request
        if told is not None:
            output.prompt_logprobs = told.found
            self.prompt_logprobs, self.job.fresh = None, False
        if request.request.return_prompt_ids and "text" in request.to_client:
            ids = self.ids[: self.prompt_length]
            # of embeddings there are none to tell
            output.prompt_token_ids = ids if min(ids, default=0) >= 0 else []

    def become(self, other: Sequence) -> None:
        """Drop the own tokens for those of `other`, which has the same prompt."""
        assert self.sampler is not None
        assert other.sampler is not None
        self.ids = other.ids[:]
        self.shareable = other.shareable
        self.grammar = None if other.grammar is None else other.grammar.fork()
        self.sampler.rules.have_seen(other.sampler.rules)
        self.job.hashes = other.job.hashes[:]

    def cut(self, ids: list[int], block_size: int) -> None:
        """Have these tokens, which begin with the prompt; nothing of them is in the cache."""
        self.ids = ids
        self.job.hashes = []
        self.refresh(block_size)

    def append(self, token: int, block_size: int) -> None:
        """One more generated token."""
        assert self.sampler is not None
        self.ids.append(token)
        self.sampler.saw(token)
        self.forced = None
        self.wary = False
        self.propose([])
        self.refresh(block_size)

    def propose(self, drafts: list[int]) -> None:
        """Guesses at the next tokens; they hold until there is a token more."""
        self.drafts = drafts
        self.job.drafts = len(drafts)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of tokens [start, stop), drafts among them."""
        known = self.ids[start:stop]
        after = len(self.ids)
        return known + self.drafts[max(0, start - after) : stop - after] if stop > after else known

    def expect(self, block_size: int) -> None:
        """As if the token that is being drawn were known, unless it is the last one in any case."""
        if self.generated + 1 < self.most:
            self.refresh(block_size, coming=1)

    def refresh(self, block_size: int, *, coming: int = 0) -> None:
        """Bring `job` up to date after tokens or rows arrived. `coming`: tokens that are taken to be there already."""
        if self.prompt is None:
            return
        job = self.job
        job.length = job.ready = len(self.ids) + coming
        if self.compiling is not None:
            job.ready = 0
            return
        shared = len(self.ids)
        if self.adapter.conditioned:
            # what a generated token is depends on its row, so only the prompt is shared
            shared = self.prompt_length
            if self.conditioning.tail is None:
                job.ready = min(job.length, self.prompt_length + self.conditioning.count)
        if block_size and self.shareable:
            while (len(job.hashes) + 1) * block_size <= shared:
                start = len(job.hashes) * block_size
                parent = job.hashes[-1] if job.hashes else chain_root(self.request.request.cache_salt)
                job.hashes.append(block_hash(parent, self._identity(start, start + block_size)))

    def _identity(self, start: int, stop: int) -> bytes:
        """What tokens [start, stop) are, as bytes; equal only where K, V and captured rows are."""
        prompt = self.prompt
        assert prompt is not None
        known = prompt.token_ids if prompt.identity is None else prompt.identity
        items = [*known[start:stop], *self.ids[max(start, self.prompt_length) : stop]]
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
        positions = np.broadcast_to(after, (self.adapter.axes, stop - start))
        if known is not None and start < self.prompt_length:
            positions = positions.copy()
            positions[:, : self.prompt_length - start] = known[:, start:]
        return positions


def _check_prompt(prompt: Prompt, axes: int, stage: str) -> None:
    """The adapter's mistakes, before they spoil a batch."""
    length = len(prompt.token_ids)
    if prompt.embeds is not None and prompt.embeds.shape[0] != length:
        raise StageFailed(f"prompt of {length} tokens with embeds {tuple(prompt.embeds.shape)}", stage=stage)
    if prompt.positions is not None and tuple(prompt.positions.shape) != (axes, length):
        raise StageFailed(
            f"prompt of {length} tokens with positions {tuple(prompt.positions.shape)}, not {(axes, length)}",
            stage=stage,
        )
    check_mutual(prompt.mutual, length, stage)
    if prompt.identity and len(prompt.identity) != length:
        raise StageFailed(f"prompt of {length} tokens with {len(prompt.identity)} identities", stage=stage)
