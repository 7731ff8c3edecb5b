"""The Triton kernels against dense attention, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from segue.kernels.form import Form
from segue.kernels.paged_attention import dense_attention
from segue.kernels.paged_step import additive

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    import segue.kernels.triton_attention as module

    return module


@dataclass
class Case:
    """Sequences of these lengths, each with so many queries at its end."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    value_width: int = 16
    block_size: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    idle: int = 0
    """Numbers at the end of each slot that belong to nobody here."""
    dtype: torch.dtype = torch.float32
    narrow: bool = False
    """K and V are kept in 8 bits."""


CASES = {
    "plain": Case((1, 7, 70, 130), (1, 7, 70, 130)),
    "chunks": Case((9, 70, 150), (3, 66, 1)),
    "grouped": Case((5, 100), (5, 30), heads=6, kv_heads=1),
    "odd widths": Case((33, 80), (33, 2), width=24, value_width=40),
    "blocks of 16": Case((33, 80), (10, 80), block_size=16),
    "window": Case((10, 150, 200), (10, 100, 70), window=13),
    "soft cap": Case((33, 80), (33, 5), softcap=3.0),
    "sinks": Case((33, 80), (33, 5), sinks=True),
    "all at once": Case((33, 180), (20, 66), window=17, softcap=3.0, sinks=True),
    "slots of a wider layer": Case((33, 80), (33, 5), idle=8),
    "half": Case((33, 80), (33, 5), dtype=torch.float16),
}

GPU_CASES = {
    f"{str(dtype).removeprefix('torch.')}, width {width}{', fp8' * narrow}": Case(
        (33, 300, 1100),
        (5, 300, 70),
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        value_width=width,
        block_size=16,
        window=window,
        softcap=softcap,
        sinks=softcap is None,
        dtype=dtype,
        narrow=narrow,
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for width in (64, 80, 96, 128, 256, 512)
    for narrow in (False, True)
    for heads, kv_heads, window, softcap in [(8, 1, 128, None) if width in (64, 96, 256) else (14, 2, None, 30.0)]
}
"""Every width that models have, compiled for the device: what an interpreter takes may be too much for one."""
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
every_case = pytest.mark.parametrize(
    "case",
    [*(pytest.param(case, id=name) for name, case in CASES.items())]
    + [pytest.param(case, id=name, marks=gpu) for name, case in GPU_CASES.items()],
)


@dataclass
class Built:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    blocks: torch.Tensor
    form: Form
    expected: torch.Tensor


def build(case: Case, counts: tuple[int, ...]) -> Built:
    random = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device=DEVICE, dtype=case.dtype)

    size = case.block_size
    needed = [-(-length // size) for length in case.lengths]
    order = torch.randperm(sum(needed) + 3, generator=random).tolist()
    # NaN where nothing was written: what is read without a mask is seen
    keys, values = (
        torch.full(
            (len(order), size, case.kv_heads * width + case.idle), float("nan"), device=DEVICE, dtype=case.dtype
        )[..., : case.kv_heads * width].unflatten(2, (case.kv_heads, width))
        for width in (case.width, case.value_width)
    )
    blocks = torch.zeros(len(needed), max(needed) + 2, dtype=torch.int32)
    sinks = normal(case.heads) if case.sinks else None
    form = Form(case.width**-0.5 * 2, case.window, case.softcap, sinks)
    q = normal(sum(counts), case.heads, case.width)
    expected, begin = [], 0
    for row, (length, count, blocks_needed) in enumerate(zip(case.lengths, counts, needed, strict=True)):
        mine = [order.pop() for _ in range(blocks_needed)]
        blocks[row, :blocks_needed] = torch.tensor(mine)
        k, v = normal(length, case.kv_heads, case.width), normal(length, case.kv_heads, case.value_width)
        if case.narrow:
            k, v = (kv.to(torch.float8_e4m3fn).to(case.dtype) for kv in (k, v))
        slots = torch.tensor([mine[at // size] * size + at % size for at in range(length)], device=DEVICE)
        keys[slots // size, slots % size], values[slots // size, slots % size] = k, v
        place = torch.arange(length, device=DEVICE)
        query = place[length - count :, None]
        seen = place <= query
        if case.window is not None:
            seen = seen & (place > query - case.window)
        wide = form._replace(sinks=None if sinks is None else sinks.double())
        mixed = dense_attention(
            q[begin : begin + count].transpose(0, 1).double(),
            k.transpose(0, 1).double(),
            v.transpose(0, 1).double(),
            additive(seen, torch.float64),
            wide,
        )
        expected.append(mixed.transpose(0, 1))
        begin += count
    if case.narrow:
        keys, values = (kv.to(torch.float8_e4m3fn) for kv in (keys, values))
    return Built(q, keys, values, blocks.to(DEVICE), form, torch.cat(expected))


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def int32(values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@every_case
def test_prefill(kernels: ModuleType, case: Case) -> None:
    built = build(case, case.counts)
    out = torch.full((len(built.q), case.heads, case.value_width), float("nan"), dtype=case.dtype, device=DEVICE)
    begins = (0, *torch.tensor(case.counts).cumsum(0).tolist()[:-1])
    tables = kernels.Tables(built.blocks, int32(case.lengths))
    kernels.prefill(
        built.q, built.keys, built.values, tables, int32(begins), int32(case.counts), max(case.counts), built.form, out
    )
    check(out, built.expected)


@pytest.mark.parametrize("splits", [1, 2, 8])
@every_case
def test_decode(kernels: ModuleType, case: Case, splits: int) -> None:
    built = build(case, (1,) * len(case.lengths))
    out = torch.full((len(built.q), case.heads, case.value_width), float("nan"), dtype=case.dtype, device=DEVICE)
    tables = kernels.Tables(built.blocks, int32(case.lengths))
    kernels.decode(built.q, built.keys, built.values, tables, splits, built.form, out)
    check(out, built.expected)


def test_a_key_more_or_less_is_seen(kernels: ModuleType) -> None:
    case = CASES["plain"]
    built = build(case, (1,) * len(case.lengths))
    out = torch.empty(len(built.q), case.heads, case.value_width, device=DEVICE)
    shorter = tuple(max(1, length - 1) for length in case.lengths)
    kernels.decode(built.q, built.keys, built.values, kernels.Tables(built.blocks, int32(shorter)), 2, built.form, out)
    assert (out.double() - built.expected)[1:].abs().amax(dim=(1, 2)).min() > 1e-4


def test_splits_fill_the_device_and_are_worth_it(kernels: ModuleType) -> None:
    assert kernels.splits_for(1, 1, 100, 132) == 1
    assert kernels.splits_for(1, 4, 32768, 132) == 64
    assert kernels.splits_for(128, 4, 32768, 132) == 1
    assert kernels.splits_for(8, 4, 4096, 132) == 16
