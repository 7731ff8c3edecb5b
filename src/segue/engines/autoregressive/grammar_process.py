"""Grammars compiled in processes of their own, which the kernel ends when their time is up.

A compilation cannot be interrupted, and some expressions take for ever. So a `CompilerHome` speaks to a process that
was forked while this one had nothing but its imports. It keeps a compiler per vocabulary, and forks a child for every
grammar. The child has set an alarm (`setitimer`) and has no handler for it: whatever it does, it ends at its time
limit, and so do its memory and its processor time. Forking costs milliseconds: nothing has to be imported again.

Where that process is killed, another is started with the next grammar, and what it had not answered is compiled again.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from segue.engines.autoregressive.xgrammar_compiler import XGrammar
from segue.messages.errors import InvalidRequest, StageFailed, shown

log = logging.getLogger(__name__)

_ORDER_BYTES = 1 << 12
_NICE = 5
"""Children give way to everything else that runs."""


class _Words(msgspec.Struct, tag=True):
    """A vocabulary; it comes through the socket that comes along, as msgpack of `_Vocabulary`."""

    number: int


class _Compile(msgspec.Struct, tag=True):
    """A grammar; it comes, and its answer goes, through the socket that comes along."""

    number: int
    """Of the vocabulary."""
    kind: str
    seconds: float


class _Alive(msgspec.Struct, tag=True):
    """Any answer will do."""


class _Vocabulary(msgspec.Struct):
    words: list[bytes]
    ends: list[int]


class _Compiled(msgspec.Struct, tag=True):
    serialized: str


class _Refused(msgspec.Struct, tag=True):
    """`InvalidRequest`: what is wrong with the source."""

    message: str


class _Broken(msgspec.Struct, tag=True):
    """What else was raised."""

    message: str


_encode = msgspec.msgpack.encode
_order = msgspec.msgpack.Decoder(_Words | _Compile | _Alive)
_vocabulary = msgspec.msgpack.Decoder(_Vocabulary)
_answer = msgspec.msgpack.Decoder(_Compiled | _Refused | _Broken)


class Home(NamedTuple):
    """A process in which `keep_home` runs."""

    control: socket.socket
    """SOCK_SEQPACKET, to there."""
    wait: Callable[[], object]
    """Returns when it has ended, and reaps it."""


class _HomeEnded(Exception):
    """Before it answered."""


class _Running:
    """A home, and what it was told; reaped when it ends."""

    def __init__(self, home: Home) -> None:
        self.control = home.control
        self.told: set[int] = set()
        """Numbers of the vocabularies it has."""
        threading.Thread(target=home.wait, name="segue-grammar-home", daemon=True).start()

    def order(self, order: _Words | _Compile | _Alive) -> socket.socket:
        """Our end of the line that goes along with an order. Raises `ConnectionError` where it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [_encode(order)], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours


class CompilerHome:
    """This process's side of a home. May be used by several threads."""

    def __init__(self, first: Home, another: Callable[[], Home]) -> None:
        """`another`: starts one in the place of one that has ended; called from threads that ask for a grammar."""
        self._running = _Running(first)
        self._another = another
        self._lock = threading.Lock()
        self._suspects = threading.Lock()
        self._count = 0
        self._closed = False

    def compiler(self, own: XGrammar, seconds: float) -> Callable[[str, str], Any]:
        """What compiles (`segue.engines.autoregressive.grammar.Compile`) for the vocabulary of `own`, at most `seconds`
        each.

        It raises `InvalidRequest` for what is wrong with the source and for too long a time, `StageFailed` where the
        child ended before that without an answer, or the home did twice.
        """
        with self._lock:
            number, self._count = self._count, self._count + 1

        def compile(kind: str, source: str) -> Any:
            order = _Compile(number, kind, seconds)
            try:
                data = self._answer(own, order, source)
            except _HomeEnded:
                # whatever it compiled may have been what ended it: one at a time, so that only that one ends it again
                with self._suspects:
                    try:
                        data = self._answer(own, order, source)
                    except _HomeEnded:
                        raise StageFailed(
                            "could not be compiled: the process that compiles grammars has ended twice while it "
                            f"compiled the {kind} {shown(source)}"
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
        """The home ends, and its children with it."""
        self._closed = True
        self._running.control.close()

    def _answer(self, own: XGrammar, order: _Compile, source: str) -> bytes:
        """What a child answers. Raises `_HomeEnded` where the home ended before that."""
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
        """A home that has the order, the line for its vocabulary where it has none yet, and that for the source."""
        with self._lock:
            for _ in range(2):
                running, words = self._running, None
                try:
                    if order.number not in running.told:
                        words = running.order(_Words(order.number))
                        running.told.add(order.number)
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
    """The home itself, until the other end of `control` closes. `born` is called in every child: it sees to it that the
    child ends with this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a child ended: the kernel reaps them
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
                    gc.freeze()  # children leave these pages shared
                case _Alive():
                    _offer(line, b"yes")
                case _Compile(number, kind, seconds):
                    if os.fork() == 0:
                        control.close()  # so that it is closed when this process is
                        _be_child(compilers[number], kind, seconds, line, born)


def _be_child(compiler: XGrammar, kind: str, seconds: float, line: socket.socket, born: Callable[[], None]) -> None:
    """Compile one grammar; never returns."""
    try:
        born()
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends a process that does not handle it
        os.nice(_NICE)
        answer: _Compiled | _Refused | _Broken
        try:
            answer = _Compiled(compiler.serialized(kind, _received(line).decode()))
        except InvalidRequest as refused:
            answer = _Refused(refused.message)
        # whatever a compiler raises is the failure of this grammar: it is told, and nothing else ends
        except Exception as broken:
            answer = _Broken(f"{type(broken).__name__}: {broken}")
        _send(line, _encode(answer))
    # any kind: the exit says nothing of an exception, and whoever asked learns only that nobody answers
    except Exception as error:
        log.error("a compiler of grammars has ended", exc_info=error)
    finally:
        os._exit(0)


def _send(line: socket.socket, data: bytes) -> None:
    """All there is to say."""
    line.sendall(data)
    line.shutdown(socket.SHUT_WR)


def _offer(line: socket.socket, data: bytes) -> None:
    """The same to an end that may have ended: whoever waits for its answer finds that out."""
    with suppress(ConnectionError):
        _send(line, data)


def _received(line: socket.socket) -> bytes:
    """What the other end sent before it said that this was all; nothing where it ended."""
    pieces = []
    try:
        while piece := line.recv(1 << 20):
            pieces.append(piece)
    except ConnectionError:  # it ended without reading all that it was sent
        return b""
    return b"".join(pieces)
