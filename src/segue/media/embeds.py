"""Prompts, or parts of them, that come as embeddings: bytes that nobody reads before the input stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import safetensors.numpy

from segue.messages.errors import InvalidRequest, shown

EMBEDS = "prompt_embeds"
"""What clients call them."""


def embeds_file(embeds: Any, field: str = EMBEDS) -> bytes:
    """A tensor or array [tokens, hidden] as a file of safetensors; bytes are such a file. Raises `InvalidRequest`."""
    if isinstance(embeds, bytes):
        return embeds
    try:
        array = np.asarray(embeds)  # of a tensor, too, which is not imported for it
    except (TypeError, RuntimeError, ValueError) as error:
        raise InvalidRequest(
            f"{field} cannot be read ({error}); it must be a tensor on the CPU of float32 or float16, without "
            "gradients, or an array",
            field=field,
        ) from error
    if array.dtype not in (np.float32, np.float16):
        raise InvalidRequest(
            f"{field} is {shown(embeds)} of {array.dtype}; it must be of float32 or float16", field=field
        )
    return safetensors.numpy.save({EMBEDS: np.ascontiguousarray(array)})
