"""Prompts that come as embeddings, one row per token: `prompt_embeds`, as vLLM has it.

They are read in the input stage, a process apart from the server. What is unpickled can run code, so nothing is: a file
of safetensors is no pickle, and of torch's own files `torch.load` reads tensors alone (`weights_only`).
"""

from __future__ import annotations

import io
import zipfile
from hashlib import blake2b
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from segue.messages.errors import InvalidRequest, TooLarge

FIELD = "prompt_embeds"
NO_TOKEN = -1
"""Stands where a row has no id: nothing is penalised for it."""
_ZIP = b"PK\x03\x04"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_embeds(data: bytes, width: int, longest: int, most_bytes: int, field: str = FIELD) -> torch.Tensor:
    """A file of torch or safetensors with one tensor → [tokens, width], on the CPU.

    `longest`: tokens of the context; `most_bytes`: of the file, 0 where the deployment takes none; `field`: where it
    stood. Raises `InvalidRequest` naming what is wrong with it, `TooLarge`.
    """
    what = FIELD if field == FIELD else f"{field} ({FIELD})"
    if len(data) > most_bytes:
        raise TooLarge(f"{what} has {len(data)} bytes; at most {most_bytes} are taken", field=field)
    try:
        tensor = _of_torch(data) if data.startswith(_ZIP) else _of_safetensors(data)
        return _checked(tensor, len(data), width, longest)
    except _Wrong as wrong:
        raise InvalidRequest(f"{what} {wrong}", field=field) from wrong


class _Wrong(Exception):
    """What is wrong with a file, as it goes on behind its name."""


def _checked(tensor: torch.Tensor, size: int, width: int, longest: int) -> torch.Tensor:
    """What was in a file of `size` bytes, as [tokens, width]."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise _Wrong(f"is a tensor of layout {tensor.layout} on {tensor.device}; it must be dense, on the CPU")
    if tensor.dtype not in _DTYPES:
        raise _Wrong(f"is of {tensor.dtype}; it must be of float32, float16 or bfloat16")
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2 or not len(tensor) or tensor.shape[1] != width:
        raise _Wrong(f"has the shape {list(tensor.shape)}; it must have [tokens, {width}]")
    if len(tensor) >= longest:
        raise _Wrong(f"has {len(tensor)} tokens; the context is {longest} tokens, so it may have {longest - 1}")
    if tensor.numel() * tensor.element_size() > size:  # one row may be told to be many
        raise _Wrong("says that it is larger than what was sent")
    if not bool(torch.isfinite(tensor).all()):
        raise _Wrong("has NaN or infinity in it")
    return tensor.contiguous()


def identity_of(embeds: torch.Tensor) -> list[int | bytes]:
    """[tokens] what each row is, for prefix caching: equal rows of whatever type are equal."""
    rows = embeds.to(torch.float32).numpy()
    return [b"embeds " + blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def runs_of(where: torch.Tensor) -> list[tuple[int, int]]:
    """[tokens] bool → ranges [start, stop) of those that are true."""
    edges = torch.diff(where.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    return list(zip((edges > 0).nonzero()[:, 0].tolist(), (edges < 0).nonzero()[:, 0].tolist(), strict=True))


def _of_torch(data: bytes) -> torch.Tensor:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            whole = sum(entry.file_size for entry in archive.infolist())
        if whole > len(data):  # torch packs nothing: whoever does wants more memory than was sent
            raise _Wrong("is a packed archive; torch.save writes them unpacked")
        with torch.sparse.check_sparse_tensor_invariants():
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except _Wrong:
        raise
    # torch raises almost anything for a file that is broken, and a broken file is the client's
    except Exception as error:
        raise _Wrong(f"cannot be read as torch.save writes it: {type(error).__name__}") from error
    if not isinstance(found, torch.Tensor):
        raise _Wrong(f"holds a {type(found).__name__}; it must hold one tensor")
    return found


def _of_safetensors(data: bytes) -> torch.Tensor:
    try:
        found: dict[str, Any] = safetensors.torch.load(data)
    # KeyError: a type that torch has not
    except (SafetensorError, ValueError, KeyError) as error:
        raise _Wrong("is neither a file of torch.save nor of safetensors") from error
    if len(found) != 1:
        raise _Wrong(f"holds {len(found)} tensors; it must hold one")
    return next(iter(found.values()))
