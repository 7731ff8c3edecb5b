"""Server-sent events, as OpenAI streams them."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"


def sse(body: object) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
