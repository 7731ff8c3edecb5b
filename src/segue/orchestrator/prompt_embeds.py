"""Prompts that come as embeddings, at the door: bytes that nobody reads before the input stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import safetensors.numpy

from segue.messages.errors import InvalidRequest, TooLarge, shown

_FIELD = "prompt_embeds"


def embeds_file(embeds: Any) -> bytes:
    """A tensor or array [tokens, hidden] as a file of safetensors; bytes are such a file. Raises `InvalidRequest`."""
    if isinstance(embeds, bytes):
        return embeds
    try:
        array = np.asarray(embeds)  # of a tensor, too, which is not imported for it
    except (TypeError, RuntimeError, ValueError) as error:
        raise InvalidRequest(
            f"{_FIELD} cannot be read ({error}); it must be a tensor on the CPU of float32 or float16, without "
            "gradients, or an array",
            field=_FIELD,
        ) from error
    if array.dtype not in (np.float32, np.float16):
        raise InvalidRequest(
            f"{_FIELD} is {shown(embeds)} of {array.dtype}; it must be of float32 or float16", field=_FIELD
        )
    return safetensors.numpy.save({_FIELD: np.ascontiguousarray(array)})


def check_embeds_bytes(size: int, most: int) -> None:
    """Raise `InvalidRequest` where the deployment takes none (`most` 0), or `TooLarge` for more than `most` bytes."""
    if not most:
        raise InvalidRequest(
            f"{_FIELD} is given; this deployment takes none: see limits.max_prompt_embeds_bytes", field=_FIELD
        )
    if size > most:
        raise TooLarge(
            f"{_FIELD} has {size} bytes; at most {most} are taken (limits.max_prompt_embeds_bytes)", field=_FIELD
        )
