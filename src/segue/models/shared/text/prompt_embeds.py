"""Read prompts that are embeddings, one row per token: `prompt_embeds`, as in vLLM.

They are read in the input stage, outside the server process. Unpickling can run code, so nothing is unpickled: a
safetensors file is not a pickle, and for torch's own files `torch.load` reads tensors alone (`weights_only`).
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from segue.graph.parts import TOKENS
from segue.media.arrays import EMBEDS, called
from segue.messages.errors import InvalidRequest, TooLarge
from segue.messages.request import Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.models.shared.text.tokenizer import MarkedTokenizer

NO_TOKEN = -1
"""Stands for a row without a token id: penalties do not apply to it."""
_ZIP, _ENTRY = b"PK\x03\x04", b"PK\x01\x02"
_MOST_ENTRIES = 4096
"""Maximum entries of an archive: torch's own have few, and each is read as an object."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_embeds(data: bytes, width: int, longest: int, most_bytes: int, field: str = EMBEDS) -> torch.Tensor:
    """A file of torch or safetensors with one tensor → [tokens, width], on the CPU.

    `longest`: tokens of the context; `most_bytes`: limit of the file, 0 if the deployment accepts none; `field`: the
    request's field, for errors. Raises `InvalidRequest` with the problem, `TooLarge`.
    """
    what = called(field)
    if len(data) > most_bytes:
        raise TooLarge(f"{what} has {len(data)} bytes; at most {most_bytes} are taken", field=field)
    try:
        tensor = _of_torch(data) if data.startswith(_ZIP) else _of_safetensors(data)
        return _checked(tensor, len(data), width, longest)
    except _Wrong as wrong:
        raise InvalidRequest(f"{what} {wrong}", field=field) from wrong


def read_parts(parts: Sequence[TextPart], width: int, longest: int, most_bytes: int) -> list[torch.Tensor]:
    """Read parts of messages that are embeddings, as `read_embeds` does."""
    return [read_embeds(part.embeds or b"", width, longest, most_bytes, part.field) for part in parts]


def in_place(ids: Sequence[int], mark: int, rows: Sequence[torch.Tensor]) -> list[int]:
    """The ids of messages, with `NO_TOKEN` for each row of a part in the place of its mark. Raises `InvalidRequest`."""
    if (marks := list(ids).count(mark)) != len(rows):
        raise InvalidRequest(
            f"the chat template renders {marks} of {len(rows)} parts of prompt_embeds; it must render each once",
            field="messages",
        )
    waiting = iter(rows)
    return [one for token in ids for one in ([NO_TOKEN] * len(next(waiting)) if token == mark else [token])]


def check_marked(tokenizer: MarkedTokenizer | None, field: str) -> MarkedTokenizer:
    """The tokenizer that marks the places of parts in `field`. Raises `InvalidRequest` if there is none."""
    if tokenizer is None:
        raise InvalidRequest(
            f"{field} is prompt_embeds; this checkpoint has no chat template, or no tokenizer that marks a place in a "
            "text: send the whole prompt as prompt_embeds",
            field=field,
        )
    return tokenizer


def check_idless(request: Request, stage: str, field: str) -> None:
    """Raise `InvalidRequest` if a request with embeddings in `field` asks for ids of the whole prompt. `stage`: reads
    the prompt."""
    sampling = request.sampling.get(stage, SamplingParams())
    for name, given in (
        ("prompt_logprobs", sampling.prompt_logprobs),
        ("truncate_prompt_tokens", sampling.truncate_prompt_tokens),
    ):
        if given is not None:
            asked = f"sampling.{stage}.{name}"
            raise InvalidRequest(f"{asked} is {given}, but prompt_embeds have no token ids", field=asked)
    if TOKENS in request.modalities:
        raise InvalidRequest("prompt_embeds have no token ids to return", field=field)


class _Wrong(Exception):
    """The problem of a file, as a phrase that follows its name."""


def _checked(tensor: torch.Tensor, size: int, width: int, longest: int) -> torch.Tensor:
    """Check a tensor from a file of `size` bytes; returns it as [tokens, width]."""
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
    if tensor.numel() * tensor.element_size() > size:  # strides may present one stored row as many
        raise _Wrong("claims to be larger than its file")
    if not bool(torch.isfinite(tensor).all()):
        raise _Wrong("contains NaN or infinity")
    return tensor.contiguous()


def identity_of(embeds: torch.Tensor) -> list[int | bytes]:
    """[tokens] prefix-cache keys: equal rows have equal keys, whatever their dtype."""
    rows = embeds.to(torch.float32).numpy()
    return [b"embeds " + blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def runs_of(where: torch.Tensor) -> list[tuple[int, int]]:
    """[tokens] bool → ranges [start, stop) of the true ones."""
    edges = torch.diff(where.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    return list(zip((edges > 0).nonzero()[:, 0].tolist(), (edges < 0).nonzero()[:, 0].tolist(), strict=True))


def _of_torch(data: bytes) -> torch.Tensor:
    try:
        if data.count(_ENTRY) > _MOST_ENTRIES:
            raise _Wrong("is an archive with too many entries")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            whole = sum(entry.file_size for entry in archive.infolist())
        if whole > len(data):  # torch compresses nothing: a compressed archive could expand beyond the size sent
            raise _Wrong("is a compressed archive; torch.save writes uncompressed ones")
        with torch.sparse.check_sparse_tensor_invariants():
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except _Wrong:
        raise
    # torch raises almost anything for a broken file, and a broken file is the client's error
    except Exception as error:
        raise _Wrong(f"cannot be read as torch.save writes it: {type(error).__name__}") from error
    if not isinstance(found, torch.Tensor):
        raise _Wrong(f"holds a {type(found).__name__}; it must hold one tensor")
    return found


def _of_safetensors(data: bytes) -> torch.Tensor:
    try:
        found: dict[str, Any] = safetensors.torch.load(data)
    # KeyError: a dtype that torch lacks
    except (SafetensorError, ValueError, KeyError) as error:
        raise _Wrong("is neither a file of torch.save nor of safetensors") from error
    if len(found) != 1:
        raise _Wrong(f"holds {len(found)} tensors; it must hold one")
    return next(iter(found.values()))
