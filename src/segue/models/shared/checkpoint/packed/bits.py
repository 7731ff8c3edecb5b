"""Unpack integers of few bits from 32-bit words."""

from __future__ import annotations

import torch
from torch.nn import functional


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """[rows, words] int32 → [rows, count] uint8: each row is one stream of bits, the lowest of a word first; a number
    may begin in one word and end in the next. `bits`: 1 to 8."""
    # a single column of words may have a transposed matrix's strides and still count as contiguous
    stream = words.contiguous().view(-1).view(torch.uint8).view(len(words), 4 * words.shape[1])
    if bits == 8:
        return stream[:, :count]
    if bits == 4:  # writes both halves of a byte side by side, as a two-byte word: contiguous memory access
        pairs = stream.to(torch.int16)
        return (pairs & 15 | pairs >> 4 << 8).view(torch.uint8)[:, :count]
    most = 2**bits - 1
    if 8 % bits == 0:
        parts = [stream >> shift & most for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).flatten(1)[:, :count]
    begins = torch.arange(count, device=words.device) * bits
    first, shifts = begins // 8, begins % 8
    wide = functional.pad(stream, (0, 1)).int()
    both = wide[:, first] | wide[:, first + 1] << 8
    return (both >> shifts & most).to(torch.uint8)
