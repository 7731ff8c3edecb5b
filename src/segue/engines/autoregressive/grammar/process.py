"""Compiles grammars in separate processes, which the kernel kills after a time limit.

A compilation cannot be interrupted, and some expressions compile forever. So a `CompilerHome` talks to a home process
that was forked while this one had done nothing but its imports. It keeps a compiler per vocabulary, and forks a child
for every grammar. The child sets an alarm (`setitimer`) and has no handler for it, so it ends at its time limit,
whatever it does, and frees its memory and its core. The kernel limits its memory until then (`RLIMIT_AS`). Forking
takes milliseconds, because nothing has to be imported again.

If the home process is killed, the next grammar starts another one, and unanswered grammars are compiled again.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from segue.engines.autoregressive.grammar.xgrammar_compiler import XGrammar
from segue.messages.errors import InvalidRequest, StageFailed, shown

log = logging.getLogger(__name__)

_ORDER_BYTES = 1 << 12
_NICE = 5
"""Niceness of children, which run at low priority."""


class _Words(msgspec.Struct, tag=True):
    """Announces a vocabulary, sent as msgpack of `_Vocabulary` through the socket attached to this message."""

    number: int


class _Compile(msgspec.Struct, tag=True):
    """Announces a grammar; its source and the answer go through the socket attached to this message."""

    number: int
    """Number of the vocabulary."""
    kind: str
    seconds: float
    memory: int
    """Bytes that the child may allocate, besides the memory it shares with the home."""


class _Alive(msgspec.Struct, tag=True):
    """A liveness probe: any answer will do."""


class _Vocabulary(msgspec.Struct):
    words: list[bytes]
    ends: list[int]


class _Compiled(msgspec.Struct, tag=True):
    serialized: str


class _Refused(msgspec.Struct, tag=True):
    """`InvalidRequest`: an error in the source."""

    message: str


class _Broken(msgspec.Struct, tag=True):
    """Any other error."""

    message: str


_encode = msgspec.msgpack.encode
_order = msgspec.msgpack.Decoder(_Words | _Compile | _Alive)
_vocabulary = msgspec.msgpack.Decoder(_Vocabulary)
_answer = msgspec.msgpack.Decoder(_Compiled | _Refused | _Broken)


class Home(NamedTuple):
    """A process that runs `keep_home`."""

    control: socket.socket
    """SOCK_SEQPACKET to the process."""
    wait: Callable[[], object]
    """Blocks until the process has ended, and reaps it."""


class _HomeEnded(Exception):
    """The home process ended before it answered."""


class _Running:
    """A home process and the vocabularies it has; a thread reaps it when it ends."""

    def __init__(self, home: Home) -> None:
        self.control = home.control
        self.sent: set[int] = set()
        """Numbers of the vocabularies that were sent to it."""
        threading.Thread(target=home.wait, name="segue-grammar-home", daemon=True).start()

    def order(self, order: _Words | _Compile | _Alive) -> socket.socket:
        """Send an order; returns our end of the socket sent with it. Raises `ConnectionError` if the home has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [_encode(order)], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours


class CompilerHome:
    """This process's side of a home process. Thread-safe."""

    def __init__(self, first: Home, another: Callable[[], Home], memory: int = 1 << 30) -> None:
        """`another`: starts a replacement for a home that has ended; called from threads that request a grammar.
        `memory`: most bytes for compiling one grammar."""
        self._memory = memory
        self._running = _Running(first)
        self._another = another
        self._lock = threading.Lock()
        self._suspects = threading.Lock()
        self._count = 0
        self._closed = False

    def compiler(self, own: XGrammar, seconds: float) -> Callable[[str, str], Any]:
        """A compile function (`segue.engines.autoregressive.grammar.grammar.Compile`) for the vocabulary of `own`, with
        a limit of `seconds` each.

        It raises `InvalidRequest` for errors in the source and for a time-out, `StageFailed` if the child ended without
        an answer before that, or the home ended twice.
        """
        with self._lock:
            number, self._count = self._count, self._count + 1

        def compile(kind: str, source: str) -> Any:
            order = _Compile(number, kind, seconds, self._memory)
            try:
                data = self._answer(own, order, source)
            except _HomeEnded:
                # its grammar may have killed the home: retry suspects one by one, so that only the guilty one fails
                with self._suspects:
                    try:
                        data = self._answer(own, order, source)
                    except _HomeEnded:
                        raise StageFailed(
                            "could not be compiled: the process that compiles grammars ended twice while compiling "
                            f"the {kind} {shown(source)}"
                        ) from None
            match _answer.decode(data):
                case _Compiled(serialized):
                    return own.deserialized(serialized)
                case _Refused(message):
                    raise InvalidRequest(message)
                case _Broken(message):
                    raise StageFailed(f"could not be compiled: {message}")

        return compile

    def close(self) -> None:
        """End the home process and its children."""
        self._closed = True
        self._running.control.close()

    def _answer(self, own: XGrammar, order: _Compile, source: str) -> bytes:
        """The child's answer. Raises `_HomeEnded` if the home ended before that."""
        began = time.monotonic()
        running, words, line = self._ordered(order)
        with line:
            if words is not None:
                with words:
                    _offer(words, _encode(_Vocabulary(own.words, own.ends)))
            _offer(line, source.encode())
            data = _received(line)
        if data:
            return data
        if time.monotonic() - began >= order.seconds:
            raise InvalidRequest(f"takes more than {order.seconds:g} seconds to compile")
        try:
            with self._lock:
                if running is not self._running:
                    raise _HomeEnded
                asked = running.order(_Alive())
        except ConnectionError as error:
            raise _HomeEnded from error
        with asked:
            if not _received(asked):
                raise _HomeEnded
        raise StageFailed("could not be compiled: the compiler has crashed")

    def _ordered(self, order: _Compile) -> tuple[_Running, socket.socket | None, socket.socket]:
        """(a home that has the order, a socket for its vocabulary if it has none yet, a socket for the source)."""
        with self._lock:
            for _ in range(2):
                running, words = self._running, None
                try:
                    if order.number not in running.sent:
                        words = running.order(_Words(order.number))
                        running.sent.add(order.number)
                    return running, words, running.order(order)
                except ConnectionError:
                    if words is not None:
                        words.close()
                    if self._closed:
                        break
                    self._running = _Running(self._another())
                    running.control.close()
        raise _HomeEnded


def keep_home(control: socket.socket, born: Callable[[], None]) -> None:
    """Body of the home process, until the other end of `control` closes. Every child calls `born`, which makes the
    child end with this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children, as no exit status is read
    compilers: dict[int, XGrammar] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _ORDER_BYTES, 1)
        if not data:
            return
        [descriptor] = descriptors
        with socket.socket(fileno=descriptor) as line:
            match _order.decode(data):
                case _Words(number):
                    given = _vocabulary.decode(_received(line))
                    compilers[number] = XGrammar(given.words, given.ends)
                    gc.freeze()  # keeps these pages shared with children
                case _Alive():
                    _offer(line, b"yes")
                case _Compile() as order:
                    if os.fork() == 0:
                        control.close()  # so that it closes when the home ends
                        _be_child(compilers[order.number], order, line, born)


def _be_child(compiler: XGrammar, order: _Compile, line: socket.socket, born: Callable[[], None]) -> None:
    """Compile one grammar in a child; never returns."""
    try:
        born()
        signal.setitimer(signal.ITIMER_REAL, order.seconds)  # SIGALRM ends a process that does not handle it
        os.nice(_NICE)
        source = _received(line).decode()
        _bound_memory(order.memory)
        answer: _Compiled | _Refused | _Broken
        try:
            answer = _Compiled(compiler.serialized(order.kind, source))
        except InvalidRequest as refused:
            answer = _Refused(refused.message)
        # any error of a compiler fails this grammar only, and is sent as its answer
        except Exception as broken:
            if isinstance(broken, MemoryError) or "bad_alloc" in str(broken):  # the library's name for it
                most = f"{order.memory} bytes of memory to compile (limits.max_grammar_bytes)"
                answer = _Refused(f"takes more than {most}")
            else:
                answer = _Broken(f"{type(broken).__name__}: {broken}")
        _send(line, _encode(answer))
    # any kind: the exit status carries no exception, and the requesting process only sees that there is no answer
    except Exception as error:
        log.error("a grammar compiler process failed", exc_info=error)
    finally:
        os._exit(0)


def _bound_memory(more: int) -> None:
    """Limit the memory that this process may map beyond its current amount; further allocations fail."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = mapped + more
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _send(line: socket.socket, data: bytes) -> None:
    """Send all data and close this direction."""
    line.sendall(data)
    line.shutdown(socket.SHUT_WR)


def _offer(line: socket.socket, data: bytes) -> None:
    """Like `_send`, but ignores a closed peer: reading its answer detects that."""
    with suppress(ConnectionError):
        _send(line, data)


def _received(line: socket.socket) -> bytes:
    """Everything that the peer sent before closing its direction; empty if it ended abnormally."""
    pieces = []
    try:
        while piece := line.recv(1 << 20):
            pieces.append(piece)
    except ConnectionError:  # the peer ended without reading all its input
        return b""
    return b"".join(pieces)
