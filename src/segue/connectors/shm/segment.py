"""A memfd that its producer and every receiver map as a whole: a table of state words, then pages of payload.

    | word 0 | word 1 | … one 8-byte word per page … | page 0 | page 1 | …

An allocation is a run of pages; the word of its first page names its owner, the words of its other pages are not used.
A word is `generation << 24 | receiver`. The table says which process may change it, and when:

    word                       state   change
    0                          free    the producer, to `generation, 0` when it allocates the run
    generation, receiver 0     put     the producer, to 0 (cancelled) · a receiver with that metadata, to its own number
    generation, receiver r     taken   receiver r, to 0 (released) · the producer, to 0, once r's connection has dropped

    page contents              written by the producer between allocating and sending the metadata, read by receiver r
                               while the word names r, accessed by nobody while it is 0

Every change is `swap`: compare and set under the memfd's `flock`. The kernel releases the lock of a killed process, so
a death leaves either the old or the new word. A pool never uses a generation twice, so the metadata of a freed run
match no word. A memfd has no name: it lives as long as a descriptor or a mapping of it.
"""

from __future__ import annotations

import fcntl
import mmap
import os

PAGE = mmap.PAGESIZE
RECEIVERS = 2**24
"""Receiver numbers are 1 to RECEIVERS - 1."""


def put_word(generation: int) -> int:
    """Return the word of a run that waits for its receiver."""
    return generation * RECEIVERS


def _header_bytes(pages: int) -> int:
    return -(-pages * 8 // PAGE) * PAGE


class Segment:
    """A mapping of one memfd. Owns `fd`, the descriptor of an open file description that no other process shares:
    `flock` excludes descriptions from each other, not processes."""

    def __init__(self, fd: int, pages: int) -> None:
        """Map the file. Raises OSError or ValueError, and closes `fd`, if the file is shorter than `pages` pages."""
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
        """Create a memfd with all its memory allocated and zero. Raises OSError if there is not enough memory."""
        size = _header_bytes(pages) + pages * PAGE
        fd = os.memfd_create("segue-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            # sealed: no process can shorten it while another has a view
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, pages)

    def reopen(self) -> int:
        """Return a descriptor for a receiver: the same memory, but its own file description and so its own lock."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR)

    def view(self, page: int, size: int) -> memoryview:
        """Return `size` bytes from the start of `page`.

        Tensors made from it keep the mapping alive by reference, not by export: never `release()` it.
        """
        return self._body[page * PAGE : page * PAGE + size]

    def holds(self, page: int, size: int) -> bool:
        """Whether `size` bytes from `page` lie inside the segment."""
        return 0 <= page < self.pages and 0 <= size <= (self.pages - page) * PAGE

    def swap(self, page: int, old: int, new: int) -> bool:
        """Set the word of `page` to `new` if it is `old`, atomically for all processes. It waits only for other swaps.

        After `close` it does nothing: the other side has seen the connection end, or is gone.
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
        """Return the memory of the pages to the system; they read as zero, and writing allocates them again."""
        self._map.madvise(mmap.MADV_REMOVE, _header_bytes(self.pages), self.pages * PAGE)

    def close(self) -> None:
        """Close the descriptor. The mapping ends with its last view."""
        os.close(self.fd)
        self.fd = -1
