"""One memfd, mapped whole by its producer and by every receiver: a table of state words, then pages of payload.

    | word 0 | word 1 | … one 8-byte word per page … | page 0 | page 1 | …

An allocation is a run of pages; the word of its first page says whose it is, the words of its other pages are not used.
A word is `generation << 24 | receiver`, and this is who may change it, and when:

    word                       state   who may change it
    0                          free    the producer, to `generation, 0` when it allocates the run
    generation, receiver 0     put     the producer, to 0 (cancelled) · a receiver with that metadata, to its own number
    generation, receiver r     taken   receiver r, to 0 (released) · the producer, to 0, once r's connection has dropped

    page contents              written by the producer between allocating and sending the metadata, read by receiver r
                               while the word names r, nobody's while it is 0

Every change is `swap`: compare and set under the memfd's `flock`. The kernel drops the lock of a process that is
killed, so a death leaves the word as it was or as it was to be. Generations are never used twice within a pool, so the
metadata of a run that was freed matches no word. A memfd has no name: it lives as long as a descriptor or a mapping of
it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

PAGE = mmap.PAGESIZE
RECEIVERS = 2**24
"""Receiver numbers are 1 to RECEIVERS - 1."""


def put_word(generation: int) -> int:
    """The word of a run that waits for its receiver."""
    return generation * RECEIVERS


def _header_bytes(pages: int) -> int:
    return -(-pages * 8 // PAGE) * PAGE


class Segment:
    """A mapping of one memfd. Owns `fd`, the descriptor of an open file description that no other process shares:
    `flock` excludes descriptions from each other, not processes."""

    def __init__(self, fd: int, pages: int) -> None:
        """Raises OSError or ValueError where the file is shorter than `pages` says; `fd` is closed then."""
        self.fd = fd
        self.pages = pages
        header = _header_bytes(pages)
        try:
            # populate: page faults would cost more than the copy
            self._map = mmap.mmap(fd, header + pages * PAGE, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(fd)
            raise
        whole = memoryview(self._map)
        self.words = whole[: pages * 8].cast("Q")
        self._body = whole[header:]

    @classmethod
    def create(cls, pages: int) -> Segment:
        """A new memfd with all its memory allocated and zero. Raises OSError where there is not that much."""
        size = _header_bytes(pages) + pages * PAGE
        fd = os.memfd_create("segue-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            # nobody can shorten it under somebody's view
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, pages)

    def reopen(self) -> int:
        """A descriptor for a receiver: of the same memory, and of a description (so a lock) of its own."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)

    def view(self, page: int, size: int) -> memoryview:
        """`size` bytes from the start of `page`.

        Tensors made from it keep the mapping alive by reference, not by export: never `release()` it.
        """
        return self._body[page * PAGE : page * PAGE + size]

    def holds(self, page: int, size: int) -> bool:
        """Whether `size` bytes from `page` lie inside."""
        return 0 <= page < self.pages and 0 <= size <= (self.pages - page) * PAGE

    def swap(self, page: int, old: int, new: int) -> bool:
        """Set the word of `page` to `new` if it is `old`, as one step for all processes. Waits for other swaps only.

        After `close` it does nothing: the other side has seen the connection drop, or is gone.
        """
        if self.fd < 0:
            return False
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        try:
            if self.words[page] != old:
                return False
            self.words[page] = new
            return True
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def hollow(self) -> None:
        """Give the memory of the pages back to the system; they read as zero, and are allocated again when written."""
        self._map.madvise(mmap.MADV_REMOVE, _header_bytes(self.pages), self.pages * PAGE)

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last view of it."""
        os.close(self.fd)
        self.fd = -1
