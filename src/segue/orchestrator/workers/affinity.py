"""What workers were sent before, for routing by prefix and by session: bounded memories that forget the oldest entries.

The control plane has no token ids. It hashes what it sees of a prompt (text, ids, media bytes) in blocks, each chained
to the one before, as the KV cache does with tokens. A wrong guess costs time, never correctness: each worker looks up
its own cache.

Optional reading: `Router` asks it where a session or a prefix was last.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

import msgspec

from segue.messages.request import MediaPart, Request, TextPart

BLOCK_BYTES = 256
"""Text per block, about 64 tokens."""
BLOCK_IDS = 64
MOST_BLOCKS = 1024
"""Blocks of one prompt that are hashed; what is common after 256 KiB of text does not change the choice."""
REMEMBERED_BLOCKS = 16384
"""Blocks remembered per worker: about a million tokens, in 2 MB."""
REMEMBERED_SESSIONS = 16384

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def prefix_of(request: Request) -> list[bytes]:
    """Return the hash chain of a request's prompt: one hash per full block, which covers everything before it."""
    root = _encoded((request.cache_salt, request.adapter))
    chain: list[bytes] = []
    parent = hashlib.blake2b(root, digest_size=16).digest()
    for block in _blocks(request):
        parent = hashlib.blake2b(block, key=parent, digest_size=16).digest()
        chain.append(parent)
        if len(chain) == MOST_BLOCKS:
            break
    return chain


def _blocks(request: Request) -> Iterator[bytes]:
    ids = request.prompt_token_ids
    if ids is not None:
        for start in range(0, len(ids) - BLOCK_IDS + 1, BLOCK_IDS):
            yield _encoded(ids[start : start + BLOCK_IDS])
        return
    rest = bytearray()
    for piece in _pieces(request):
        rest += piece
        whole = len(rest) - len(rest) % BLOCK_BYTES
        for start in range(0, whole, BLOCK_BYTES):
            yield bytes(rest[start : start + BLOCK_BYTES])
        del rest[:whole]


def _pieces(request: Request) -> Iterator[bytes]:
    """Yield the prompt in the order in which a chat template writes it: tools and options, then the messages."""
    if request.prompt is not None:
        yield request.prompt.encode(errors="surrogatepass")
    if request.prompt_embeds is not None:
        yield _media_key(request.prompt_embeds)
    if request.messages and (request.chat.tools or request.chat.template_kwargs):
        yield _encoded((request.chat.tools, request.chat.template_kwargs))
    for message in request.messages:
        yield _encoded((message.role, message.extra))
        for part in message.content:
            if isinstance(part, MediaPart):
                # a medium becomes hundreds of tokens: it fills blocks of its own
                yield (_encoded((part.kind, part.array, part.frames)) + _media_key(part.data)).ljust(BLOCK_BYTES)
            elif part.embeds is not None:
                yield _media_key(part.embeds)
            else:
                yield part.text.encode(errors="surrogatepass")
    for received in request.received:
        if isinstance(received.part, TextPart):
            yield received.part.text.encode(errors="surrogatepass")


def _media_key(data: bytes) -> bytes:
    """Return a hash of the length and of samples of a file: hashing all of it would block the server for too long."""
    step = max(_SAMPLE_BYTES, (len(data) - _SAMPLE_BYTES) // (_SAMPLES - 1) if len(data) > _SAMPLE_BYTES else 0)
    found = hashlib.blake2b(len(data).to_bytes(8, "big"), digest_size=32)
    for start in range(0, len(data), step):
        found.update(data[start : start + _SAMPLE_BYTES])
    return found.digest()


def _encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


class PrefixMemory:
    """The blocks that one worker was sent."""

    def __init__(self, most: int = REMEMBERED_BLOCKS) -> None:
        self._most = most
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, block: bytes) -> bool:
        return block in self._known

    def held(self, chain: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain the worker was sent."""
        for at, key in enumerate(chain):
            if key not in self._known:
                return at
        return len(chain)

    def remember(self, chain: Sequence[bytes]) -> None:
        """Record that the worker was sent a chain. The last blocks are forgotten before the first."""
        for key in reversed(chain):
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


class Sessions:
    """The worker that had the latest request of each session, by group of stages."""

    def __init__(self, most: int = REMEMBERED_SESSIONS) -> None:
        self._most = most
        self._workers: OrderedDict[Hashable, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def worker(self, session: Hashable) -> str | None:
        return self._workers.get(session)

    def remember(self, session: Hashable, worker: str) -> None:
        self._workers[session] = worker
        self._workers.move_to_end(session)
        while len(self._workers) > self._most:
            self._workers.popitem(last=False)
