"""Structured output: text held to a JSON schema, a regular expression, a choice or a grammar, by xgrammar.

A grammar is compiled for the stage's vocabulary (its bytes, so that no tokenizer is needed) beside the engine; workers
have it done by a process that ends when its time is up (`grammar_process`). Until it is there its request waits and all
others run. From then on every output has a `Grammar`, its place in the grammar: `mask` says which tokens may come,
`accept` goes on by one, `rollback` goes back, `fork` makes another output from this place.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from segue.engines.autoregressive.contract import AutoregressiveAdapter, Vocabulary
from segue.engines.autoregressive.grammar_process import CompilerHome
from segue.engines.autoregressive.json_schema import parsed, unsupported
from segue.engines.autoregressive.structural_tag import structural_tag
from segue.engines.autoregressive.xgrammar_compiler import MAX_COMPILED_BYTES, XGrammar, blank_mask, possible
from segue.engines.contract import StageRequest
from segue.kernels.staging import upload
from segue.messages.errors import InvalidRequest, SegueError, StageFailed
from segue.messages.sampling import StructuredOutput, form_of

MAX_SOURCE_BYTES = 256 << 10
"""Of a schema, an expression, a grammar, or all choices together."""
MAX_COMPILE_SECONDS = 60.0
"""From asking for a grammar until it must be there."""
COMPILERS = 2
"""How many are compiled at once in this process, in threads that cannot be stopped."""
COMPILERS_APART = 8
"""How many are compiled at once in processes of their own, which give way to everything else."""

Compile = Callable[[str, str], Any]
"""(kind, source) → `xgrammar.CompiledGrammar`. Raises `InvalidRequest` for what is wrong with the source; what it says
follows the name of the parameter."""


def form_field(request: StageRequest) -> str:
    """The parameter that says what form the text must have."""
    field = f"sampling.{request.stage}.structured_outputs"
    asked = request.sampling.structured_outputs
    form = None if asked is None else form_of(asked)
    return field if form is None else f"{field}.{form}"


def source_of(asked: StructuredOutput, field: str) -> tuple[str, str]:
    """(kind, text to compile). Raises `InvalidRequest` for what can be seen without compiling."""
    json_kind = "tight_json" if asked.disable_any_whitespace else "json"
    if asked.json is not None:
        kind, source = json_kind, _schema(asked.json, f"{field}.json")
    elif asked.json_object:
        kind, source = json_kind, '{"type": "object"}'
    elif asked.structural_tag is not None:
        kind, source = "structural_tag", structural_tag(asked.structural_tag, f"{field}.structural_tag")
    elif asked.regex is not None:
        kind, source = "regex", asked.regex
    elif asked.grammar is not None:
        kind, source = "grammar", asked.grammar
    else:
        texts = (json.dumps(text, ensure_ascii=False) for text in asked.choice or ())
        kind, source = "grammar", "root ::= " + " | ".join(texts)
    field = f"{field}.{form_of(asked)}"
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} holds half a surrogate pair, which is no text", field=field) from error
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{field} has {size} bytes; at most {MAX_SOURCE_BYTES} are taken", field=field)
    return kind, source


def _schema(schema: dict[str, Any] | str, field: str) -> str:
    schema = parsed(schema, field)
    try:
        wrong = unsupported(schema)
        source = json.dumps(schema, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from error
    if wrong is not None:
        raise InvalidRequest(f"{field} has {wrong}", field=field)
    return source


class Grammar:
    """Where one output is in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, *, endless: bool) -> None:
        """`endless`: no token ends the output."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._endless = endless

    def mask(self, bitmask: torch.Tensor, row: int) -> None:
        """Fill `bitmask` [rows, ceil(vocab / 32)] int32 at `row`: bit t of it says whether token t may come. The end
        token may where the text can be over."""
        self._matcher.fill_next_token_bitmask(bitmask, row)

    def accept(self, token: int) -> bool:
        """Go on by one token; False, and nothing changes, where it may not come."""
        return self._matcher.accept_token(token)

    def rollback(self, tokens: int) -> None:
        """Go back by so many accepted tokens."""
        self._matcher.rollback(tokens)

    def fork(self) -> Grammar:
        """Another output at the same place."""
        return Grammar(self._matcher.fork(), self._vocab_size, endless=self._endless)

    @property
    def over(self) -> bool:
        """The end token was accepted."""
        return self._matcher.is_terminated()

    @property
    def exhausted(self) -> bool:
        """No token ends the output, but nothing can follow."""
        return self._endless and self._matcher.is_completed() and not self.possible()

    def possible(self) -> bool:
        """Some token may come."""
        return possible(self._matcher, self._vocab_size)


class Form(Protocol):
    """Where one output is in what it must be: a `Grammar`, or one that begins later."""

    def mask(self, bitmask: torch.Tensor, row: int) -> None: ...

    def accept(self, token: int) -> bool: ...

    def rollback(self, tokens: int) -> None: ...

    def fork(self) -> Form: ...

    @property
    def over(self) -> bool: ...

    @property
    def exhausted(self) -> bool: ...


class Place(NamedTuple):
    """Rows of logits that follow each other in one output."""

    grammar: Form
    row: int
    """The first."""
    drafts: Sequence[int] = ()
    """Guesses: row `row + j` comes after `drafts[:j]`."""


def apply_grammars(logits: torch.Tensor, places: Sequence[Place]) -> None:
    """-inf for what may not come, in `logits` [rows, vocab] float32; rows that are in no place may be anything.

    Behind a guess that may not come, or that ends the output, nothing is forbidden: nobody gets there.
    """
    if not places:
        return
    from xgrammar import apply_token_bitmask_inplace  # see XGrammar

    bitmask = blank_mask(len(logits), logits.shape[-1])
    rows = []
    for grammar, first, drafts in places:
        grammar.mask(bitmask, first)
        rows.append(first)
        taken = 0
        for draft in drafts:
            if not grammar.accept(draft):
                break
            taken += 1
            if grammar.over:
                break
            grammar.mask(bitmask, first + taken)
            rows.append(first + taken)
        grammar.rollback(taken)
    apply_token_bitmask_inplace(
        logits, upload(bitmask.numpy(), logits.device), vocab_size=logits.shape[-1], indices=rows
    )


class Compilation:
    """A grammar that is being compiled, or is."""

    def __init__(self, kind: str, source: str) -> None:
        self.kind = kind
        self.source = source
        self.compiled: Any = None
        self.error: SegueError | None = None
        self.done = False
        self._lock = threading.Lock()
        self.timer: threading.Timer | None = None

    def settle(self, compiled: Any, error: SegueError | None) -> bool:
        """The end of it, whichever comes first: result, error or time-out. False where there was one already."""
        with self._lock:
            if self.done:
                return False
            self.compiled, self.error, self.done = compiled, error, True
        if self.timer is not None:
            self.timer.cancel()
        return True


class Grammars:
    """The grammars of one stage: compiles them beside the engine's thread, and keeps what was compiled."""

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        vocab_size: int,
        end_token_ids: Collection[int],
        *,
        wake: Callable[[], None] = lambda: None,
        compile: Compile | None = None,
        home: CompilerHome | None = None,
        most_seconds: float = MAX_COMPILE_SECONDS,
        kept_bytes: int = MAX_COMPILED_BYTES,
    ) -> None:
        """`wake` is called, from another thread, when a grammar is there or has failed. `home`: where they are
        compiled; None: in this process. `kept_bytes`: of all that are kept for the next request."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._ends = sorted(token for token in end_token_ids if token < vocab_size)
        self._wake = wake
        self._compile = compile
        self._home = home
        self._most_seconds = most_seconds
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[tuple[str, str], Compilation] = OrderedDict()
        self._work: queue.SimpleQueue[Compilation] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._making = threading.Lock()

    @classmethod
    def of(
        cls, adapter: AutoregressiveAdapter, wake: Callable[[], None] = lambda: None, home: CompilerHome | None = None
    ) -> Grammars:
        return cls(adapter.vocabulary, adapter.vocab_size, adapter.end_token_ids, wake=wake, home=home)

    def ask(self, request: StageRequest) -> Compilation | None:
        """The grammar a request wants, None where it wants none. Equal ones are compiled once.

        Raises `InvalidRequest` for what can be seen at once.
        """
        asked = request.sampling.structured_outputs
        if asked is None:
            return None
        field = f"sampling.{request.stage}.structured_outputs"
        if self._vocabulary is None:
            raise InvalidRequest(f"{field} is set, but stage {request.stage!r} has no tokenizer", field=field)
        if request.sampling.min_tokens and not self._ends:
            raise InvalidRequest(f"{field} with min_tokens needs a model that has an end token", field=field)
        key = source_of(asked, field)
        known = self._kept.get(key)
        if known is not None and known.error is None:
            self._kept.move_to_end(key)
            return known
        compilation = self._kept[key] = Compilation(*key)
        self._forget()
        compilation.timer = threading.Timer(self._most_seconds, self._too_late, [compilation])
        compilation.timer.daemon = True
        compilation.timer.start()
        self._work.put(compilation)
        if len(self._threads) < (COMPILERS if self._home is None else COMPILERS_APART):
            # daemons: a compilation in this process cannot be stopped, and must not keep it from leaving
            thread = threading.Thread(target=self._run, name="segue-grammar", daemon=True)
            self._threads.append(thread)
            thread.start()
        return compilation

    def grammar(self, compilation: Compilation, stop_token_ids: Collection[int]) -> Grammar:
        """An output's place at the beginning. `stop_token_ids` of the request end it, too, where they are no text."""
        from xgrammar import GrammarMatcher  # see XGrammar

        assert self._vocabulary is not None
        stops = sorted({token for token in stop_token_ids if self._vocabulary.token_bytes([token]) == [b""]})
        ends = sorted({*self._ends, *stops})
        matcher = GrammarMatcher(compilation.compiled, override_stop_tokens=ends or None)
        return Grammar(matcher, self._vocab_size, endless=not ends)

    def _run(self) -> None:
        """A compiling thread."""
        while True:
            compilation = self._work.get()
            if compilation.done:
                continue
            compiled, error = None, None
            try:
                compiled = self._compiler()(compilation.kind, compilation.source)
            except SegueError as refused:
                error = refused
            # whatever a compiler raises is the failure of this grammar, and of nothing else
            except Exception as broken:
                error = StageFailed(f"could not be compiled: {type(broken).__name__}: {broken}")
                error.__cause__ = broken
            if compilation.settle(compiled, error):
                self._wake()

    def _compiler(self) -> Compile:
        with self._making:
            if self._compile is None:
                assert self._vocabulary is not None
                own = XGrammar(self._vocabulary.token_bytes(range(self._vocab_size)), self._ends)
                self._compile = own if self._home is None else self._home.compiler(own, self._most_seconds)
            return self._compile

    def _too_late(self, compilation: Compilation) -> None:
        late = InvalidRequest(f"takes more than {self._most_seconds:g} seconds to compile")
        if compilation.settle(None, late):
            self._wake()

    def _forget(self) -> None:
        """What was compiled and not used for longest, while all together are too large."""
        for key in [key for key, one in self._kept.items() if one.error is not None]:
            del self._kept[key]
        settled = {key: one.compiled.memory_size_bytes for key, one in self._kept.items() if one.compiled is not None}
        total = sum(settled.values())
        for key, size in settled.items():
            if total <= self._kept_bytes:
                break
            del self._kept[key]
            total -= size
