"""Grammars compiled in processes of their own, which the kernel ends when their time is up.

A compilation cannot be interrupted, and some expressions take for ever. So a `CompilerHome` speaks to a process that
was forked while this one had nothing but its imports. It keeps a compiler per vocabulary, and forks a child for every
grammar. The child has set an alarm (`setitimer`) and has no handler for it: whatever it does, it ends at its time
limit, and so do its memory and its processor time. Forking costs milliseconds: nothing has to be imported again.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from segue.engines.autoregressive.xgrammar_compiler import XGrammar
from segue.messages.errors import InvalidRequest, StageFailed
from segue.observe.stderr import say_error

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
_order = msgspec.msgpack.Decoder(_Words | _Compile)
_vocabulary = msgspec.msgpack.Decoder(_Vocabulary)
_answer = msgspec.msgpack.Decoder(_Compiled | _Refused | _Broken)


class CompilerHome:
    """This process's side of a home. May be used by several threads."""

    def __init__(self, control: socket.socket) -> None:
        """`control`: a SOCK_SEQPACKET socket to where `keep_home` runs."""
        self._control = control
        self._lock = threading.Lock()
        self._count = 0

    def compiler(self, own: XGrammar, words: Sequence[bytes], seconds: float) -> Callable[[str, str], Any]:
        """What compiles (`segue.engines.autoregressive.grammar.Compile`) for the vocabulary `words` that `own` is for,
        at most `seconds` each.

        It raises `InvalidRequest` for what is wrong with the source and for too long a time, `StageFailed` where the
        child ended before that without an answer.
        """
        with self._lock:
            number, self._count = self._count, self._count + 1
        with self._order(_Words(number)) as line:
            _send(line, _encode(_Vocabulary(list(words), own.ends)))

        def compile(kind: str, source: str) -> Any:
            began = time.monotonic()
            with self._order(_Compile(number, kind, seconds)) as line:
                try:
                    _send(line, source.encode())
                    data = _received(line)
                except (BrokenPipeError, ConnectionResetError):
                    data = b""  # it has ended already
            if not data and time.monotonic() - began >= seconds:
                raise InvalidRequest(f"takes more than {seconds:g} seconds to compile")
            if not data:
                raise StageFailed("could not be compiled: the compiler has crashed")
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
        self._control.close()

    def _order(self, order: _Words | _Compile) -> socket.socket:
        """Our end of the line that goes along with an order."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._control, [_encode(order)], [theirs.fileno()])
        return ours


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
                case _Compile(number, kind, seconds):
                    if os.fork() == 0:
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
    except BaseException as error:
        say_error(error)
    finally:
        os._exit(0)


def _send(line: socket.socket, data: bytes) -> None:
    """All there is to say."""
    line.sendall(data)
    line.shutdown(socket.SHUT_WR)


def _received(line: socket.socket) -> bytes:
    """What the other end sent before it said that this was all; nothing where it ended."""
    pieces = []
    while piece := line.recv(1 << 20):
        pieces.append(piece)
    return b"".join(pieces)
