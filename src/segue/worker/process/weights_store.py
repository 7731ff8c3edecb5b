"""What the fork server keeps for workers of one stage on one device, so that they can share weights.

A memfd has the lock under which they load, the index of the shared weights, and on a CPU the weights themselves. Its
seals say that a worker has filled it.

File descriptors keep memory of a CUDA device, and a message in the queue of a socket keeps the descriptors: the worker
that fills the memory sends it, the others peek at it. MSG_PEEK duplicates the descriptors of a message and leaves it in
the queue, so the kernel keeps the memory until all processes have closed the sockets, whichever worker dies.

Optional reading: a fork server keeps one per stage and device, so that weights outlive workers.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import msgspec

MOST_DESCRIPTORS = 253
"""Of one message (SCM_MAX_FD of Linux)."""
_MESSAGE_BYTES = 1 << 12
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LENGTH = 8


class WeightsStore:
    """Made by the fork server; each worker inherits it by fork."""

    def __init__(self) -> None:
        self.memfd = os.memfd_create("segue-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._into, self._kept = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, so that other workers neither load nor fill the store. The kernel releases the lock of a
        process that dies."""
        fcntl.lockf(self.memfd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.memfd, fcntl.LOCK_UN)

    @property
    def sealed(self) -> bool:
        """Whether a worker has filled it."""
        return bool(fcntl.fcntl(self.memfd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    def seal(self) -> None:
        """Forbid changes of the memfd."""
        fcntl.fcntl(self.memfd, fcntl.F_ADD_SEALS, _SEALS)

    def begin(self, index: bytes) -> None:
        """Write the index, and remove what a worker has left that died while it filled the store."""
        os.ftruncate(self.memfd, 0)
        with suppress(BlockingIOError):
            while True:
                close_all(self._read(0)[1])
        os.pwrite(self.memfd, len(index).to_bytes(_LENGTH, "big") + index, 0)

    @property
    def index(self) -> bytes:
        return os.pread(self.memfd, self.index_end - _LENGTH, _LENGTH)

    @property
    def index_end(self) -> int:
        """Offset in the memfd of the first byte after the index."""
        return _LENGTH + int.from_bytes(os.pread(self.memfd, _LENGTH, 0), "big")

    def send(self, sizes: list[int], descriptors: list[int]) -> None:
        """Keep the memory of at most `MOST_DESCRIPTORS` file descriptors, `sizes` bytes each."""
        socket.send_fds(self._into, [msgspec.msgpack.encode(sizes)], descriptors)

    def peek(self) -> tuple[list[int], list[int]]:
        """Return the sizes that were sent, and duplicates of the file descriptors, which the caller closes."""
        return self._read(socket.MSG_PEEK)

    def close(self) -> None:
        """Close it in this process."""
        os.close(self.memfd)
        self._into.close()
        self._kept.close()

    def _read(self, flags: int) -> tuple[list[int], list[int]]:
        # not `socket.recv_fds`: it ignores its flags
        flags |= socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        space = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        data, control, found, _ = self._kept.recvmsg(_MESSAGE_BYTES, space, flags)
        descriptors = array.array("i")
        for _, _, piece in control:
            descriptors.frombytes(piece[: len(piece) - len(piece) % descriptors.itemsize])
        if found & socket.MSG_CTRUNC:
            close_all(descriptors)
            raise OSError(errno.EMFILE, "the process may not have as many file descriptors as were sent")
        return msgspec.msgpack.decode(data, type=list[int]), list(descriptors)


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
