"""Structured output: constrains text to a JSON schema, a regular expression, a choice or a grammar, with xgrammar.

A grammar is compiled for the stage's vocabulary (its bytes, so no tokenizer is needed) outside the engine's thread; in
workers a process does so that is killed after a time limit (`process`). Until then its request waits, while all others
run. Then every output has a `Grammar`, its state in the grammar: `mask` gives the allowed tokens, `accept` advances by
one token, `rollback` goes back, `fork` copies the state for another output.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from segue.engines.autoregressive.contract import AutoregressiveModel, Vocabulary
from segue.engines.autoregressive.grammar.json_schema import parsed, unsupported
from segue.engines.autoregressive.grammar.process import CompilerHome
from segue.engines.autoregressive.grammar.structural_tag import structural_tag
from segue.engines.autoregressive.grammar.xgrammar_compiler import MAX_COMPILED_BYTES, XGrammar, blank_mask, possible
from segue.engines.contract import StageRequest
from segue.kernels.staging import upload
from segue.messages.errors import InvalidRequest, SegueError, StageFailed
from segue.messages.sampling import StructuredOutput, form_of

MAX_SOURCE_BYTES = 256 << 10
"""Limit for a schema, an expression, a grammar, or all choices together."""
MAX_COMPILE_SECONDS = 60.0
"""Time limit from requesting a grammar until it is compiled."""
COMPILERS = 2
"""Concurrent compilations in this process, in threads that cannot be stopped."""
COMPILERS_APART = 8
"""Concurrent compilations in separate processes, which run at low priority."""

Compile = Callable[[str, str], Any]
"""(kind, source) → `xgrammar.CompiledGrammar`. Raises `InvalidRequest` for errors in the source; its message continues
a sentence that begins with the parameter's name."""


def form_field(request: StageRequest) -> str:
    """Name of the request parameter that defines the required form of the text."""
    field = f"sampling.{request.stage}.structured_outputs"
    asked = request.sampling.structured_outputs
    form = None if asked is None else form_of(asked)
    return field if form is None else f"{field}.{form}"


def source_of(asked: StructuredOutput, field: str) -> tuple[str, str]:
    """(kind, text to compile). Raises `InvalidRequest` for errors visible without compiling."""
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
        raise InvalidRequest(f"{field} contains half a surrogate pair, which is not text", field=field) from error
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{field} has {size} bytes; at most {MAX_SOURCE_BYTES} are allowed", field=field)
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
    """State of one output in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, *, endless: bool) -> None:
        """`endless`: no token ends the output."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._endless = endless

    def mask(self, bitmask: torch.Tensor, row: int) -> None:
        """Fill `bitmask` [rows, ceil(vocab / 32)] int32 at `row`: bit t says whether token t is allowed. The end token
        is allowed if the text can end."""
        self._matcher.fill_next_token_bitmask(bitmask, row)

    def accept(self, token: int) -> bool:
        """Advance by one token; returns False, without any change, if it is forbidden."""
        return self._matcher.accept_token(token)

    def rollback(self, tokens: int) -> None:
        """Go back by this many accepted tokens."""
        self._matcher.rollback(tokens)

    def fork(self) -> Grammar:
        """A copy of the state for another output."""
        return Grammar(self._matcher.fork(), self._vocab_size, endless=self._endless)

    @property
    def over(self) -> bool:
        """Whether the end token was accepted."""
        return self._matcher.is_terminated()

    @property
    def exhausted(self) -> bool:
        """Whether nothing can follow, for an output that no token ends."""
        return self._endless and self._matcher.is_completed() and not self.possible()

    def possible(self) -> bool:
        """Whether any token is allowed next."""
        return possible(self._matcher, self._vocab_size)


class Form(Protocol):
    """State of one output in its required form: a `Grammar`, or one that begins later."""

    def mask(self, bitmask: torch.Tensor, row: int) -> None: ...

    def accept(self, token: int) -> bool: ...

    def rollback(self, tokens: int) -> None: ...

    def fork(self) -> Form: ...

    @property
    def over(self) -> bool: ...

    @property
    def exhausted(self) -> bool: ...


class GrammarRows(NamedTuple):
    """Consecutive rows of logits of one output."""

    grammar: Form
    row: int
    """The first row."""
    drafts: Sequence[int] = ()
    """Draft tokens: row `row + j` follows `drafts[:j]`."""


def apply_grammars(logits: torch.Tensor, places: Sequence[GrammarRows]) -> None:
    """Set forbidden tokens to -inf in `logits` [rows, vocab] float32; rows without a grammar are unchanged.

    After a draft that is forbidden or ends the output, nothing is masked, because no output continues there.
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
    """A grammar that is being compiled or has been compiled."""

    def __init__(self, kind: str, source: str) -> None:
        self.kind = kind
        self.source = source
        self.compiled: Any = None
        self.error: SegueError | None = None
        self.done = False
        self._lock = threading.Lock()
        self.timer: threading.Timer | None = None

    def settle(self, compiled: Any, error: SegueError | None) -> bool:
        """Store the first outcome: result, error or time-out. Returns False if there was one already."""
        with self._lock:
            if self.done:
                return False
            self.compiled, self.error, self.done = compiled, error, True
        if self.timer is not None:
            self.timer.cancel()
        return True


class Grammars:
    """The grammars of one stage: compiles them outside the engine's thread, and caches the results."""

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
        """`wake` is called, from another thread, when a grammar has compiled or failed. `home`: the process that
        compiles; None: this one. `kept_bytes`: limit of all cached grammars."""
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
        cls, model: AutoregressiveModel, wake: Callable[[], None] = lambda: None, home: CompilerHome | None = None
    ) -> Grammars:
        return cls(model.vocabulary, model.vocab_size, model.end_token_ids, wake=wake, home=home)

    def ask(self, request: StageRequest) -> Compilation | None:
        """Request the grammar of a request; None if it has none. Equal grammars are compiled once.

        Raises `InvalidRequest` for errors visible at once.
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
            # daemons: a compilation in this process cannot be stopped, and must not block its exit
            thread = threading.Thread(target=self._run, name="segue-grammar", daemon=True)
            self._threads.append(thread)
            thread.start()
        return compilation

    def grammar(self, compilation: Compilation, stop_token_ids: Collection[int]) -> Grammar:
        """Initial state of an output. `stop_token_ids` of the request end it, too, if they have no text."""
        from xgrammar import GrammarMatcher  # see XGrammar

        assert self._vocabulary is not None
        stops = sorted({token for token in stop_token_ids if self._vocabulary.token_bytes([token]) == [b""]})
        ends = sorted({*self._ends, *stops})
        matcher = GrammarMatcher(compilation.compiled, override_stop_tokens=ends or None)
        return Grammar(matcher, self._vocab_size, endless=not ends)

    def _run(self) -> None:
        """Body of a compiling thread."""
        while True:
            compilation = self._work.get()
            if compilation.done:
                continue
            compiled, error = None, None
            try:
                compiled = self._compiler()(compilation.kind, compilation.source)
            except SegueError as refused:
                error = refused
            # any error of a compiler fails this grammar only
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
        """Drop failed compilations, and the least recently used ones while the cache exceeds its limit."""
        for key in [key for key, one in self._kept.items() if one.error is not None]:
            del self._kept[key]
        settled = {key: one.compiled.memory_size_bytes for key, one in self._kept.items() if one.compiled is not None}
        total = sum(settled.values())
        for key, size in settled.items():
            if total <= self._kept_bytes:
                break
            del self._kept[key]
            total -= size
