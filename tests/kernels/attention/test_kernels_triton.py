"""The Triton kernels against dense attention, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_attention import dense_attention
from segue.kernels.attention.paged_step import additive

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    import segue.kernels.attention.backends.triton_kernels as module

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
    apart: bool = False
    """The numbers of a head of q do not follow each other in memory."""


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
    "q with strides": Case((33, 80), (33, 5), apart=True),
    "one long among short ones": Case((5, 1500, 400, 9), (5, 20, 1, 9), heads=2, kv_heads=1, block_size=16),
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
    form: AttentionOptions
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
    form = AttentionOptions(case.width**-0.5 * 2, case.window, case.softcap, sinks)
    q = normal(sum(counts), case.heads, case.width)
    if case.apart:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
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
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}[out.dtype]
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


def decoded(kernels: ModuleType, built: Built, case: Case, lengths: tuple[int, ...], processors: int) -> torch.Tensor:
    out = torch.full((len(built.q), case.heads, case.value_width), float("nan"), dtype=case.dtype, device=DEVICE)
    splits = kernels.split_keys(
        int32(lengths),
        max(lengths),
        case.kv_heads,
        max(case.width, case.value_width),
        case.dtype,
        processors,
        case.window,
    )
    kernels.decode(built.q, built.keys, built.values, built.blocks, splits, built.form, out)
    return out


@pytest.mark.parametrize("processors", [1, 8])
@every_case
def test_decode(kernels: ModuleType, case: Case, processors: int) -> None:
    built = build(case, (1,) * len(case.lengths))
    check(decoded(kernels, built, case, case.lengths, processors), built.expected)


def test_a_key_more_or_less_is_seen(kernels: ModuleType) -> None:
    case = CASES["plain"]
    built = build(case, (1,) * len(case.lengths))
    shorter = tuple(max(1, length - 1) for length in case.lengths)
    out = decoded(kernels, built, case, shorter, 2)
    assert (out.double() - built.expected)[1:].abs().amax(dim=(1, 2)).min() > 1e-4


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(
    "lengths",
    [
        (1,),
        (257,),
        (40_000,),
        (65_536, *[512] * 63),
        pytest.param((300,) * 130, marks=pytest.mark.nightly),
        (1, 9000, 1, 64, 65, 4000),
    ],
)
def test_splits(kernels: ModuleType, lengths: tuple[int, ...], window: int | None) -> None:
    """Every key in one split; no split much longer than a program's share of all keys."""
    made = kernels.split_keys(int32(lengths), 70_000, 8, 128, torch.bfloat16, 132, window)
    firsts = made.firsts.tolist()
    count = firsts[-1]
    assert count <= made.table.shape[1] <= len(lengths) + 33, "a grid that depends on no length"
    splits = list(zip(*made.table[:, :count].tolist(), strict=True))
    seen = [min(length, window or length) for length in lengths]
    for row, length in enumerate(lengths):
        own = splits[firsts[row] : firsts[row + 1]]
        assert {sequence for sequence, _, _ in own} == {row}
        assert (own[0][1], own[-1][2]) == (length - seen[row], length)
        assert all(before[2] == after[1] for before, after in itertools.pairwise(own))
        assert all(start < stop for _, start, stop in own)
    assert max(stop - start for _, start, stop in splits) <= max(256, sum(seen) / 33 + 64)


def test_a_batch_of_short_sequences_does_not_wait_for_a_long_one(kernels: ModuleType) -> None:
    made = kernels.split_keys(int32((65_536, *[512] * 63)), 65_536, 8, 128, torch.bfloat16, 132)
    firsts = made.firsts.tolist()
    assert firsts[1] > 20
    assert firsts[-1] - firsts[1] == 63


_COMPILED = """
import json, re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

triton.runtime.driver.set_active(Hopper())
made = []
run = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **more: made.append(
    (self.fn.__name__, run(self, *args, grid=grid, warmup=True, **more)))

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.backends.triton_kernels import decode, split_keys
width, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
keys = torch.empty(4, 16, 8, width, dtype=dtype)
lengths, blocks = torch.ones(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
q = torch.empty(2, 32, width, dtype=dtype)
decode(
    q, keys, keys, blocks, split_keys(lengths, 4096, 8, width, dtype, 132), AttentionOptions(1.0), torch.empty_like(q)
)
[kernel] = [kernel for name, kernel in made if name == "_decode_splits"]
waits = [int(number) for number in re.findall(r"cp\\.async\\.wait_group\\s+(\\d+)", kernel.asm["ptx"])]
print(json.dumps([sorted(name for name, _ in made), waits, kernel.metadata.shared]))
"""


@pytest.mark.parametrize(("width", "dtype"), [(128, "bfloat16"), (512, "float32")])
def test_a_decode_on_a_hopper_loads_ahead(width: int, dtype: str) -> None:
    """The kernels of a decode, compiled for sm_90 as they are launched: at no place but the end of the loop does one
    wait for all the loads that are under way, and its tiles fit into shared memory."""
    triton = pytest.importorskip("triton")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not bundled.exists():
        pytest.skip(f"Triton brings no ptxas ({bundled})")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", _COMPILED, str(width), dtype],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    names, waits, shared = json.loads(ran.stdout.splitlines()[-1])
    assert names == ["_decode_join", "_decode_splits", "_split"]
    assert len(waits) > 2
    assert min(waits[:-1]) > 0, waits
    assert waits[-1] == 0
    assert shared <= 227 << 10


def reached(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """What top-p keeps of one row, in float64: tokens before which less than `top_p` lies, and their equals."""
    best, order = scores.double().softmax(0).sort(descending=True)
    count = int((best.cumsum(0) - best < top_p).sum())
    return scores >= scores[order[count - 1]]


def test_top_p_on_the_device() -> None:
    from segue.kernels.top_p import lowest_kept

    random = torch.Generator().manual_seed(5)
    scores = torch.randn(6, 5000, generator=random) * torch.tensor([3.0, 0.01, 8.0, 1.0, 0.0, 2.0])[:, None]
    scores[3, 100:] = float("-inf")  # what top-k leaves
    scores[5] = scores[5].round()  # many equals
    top_p = torch.tensor([0.9, 0.5, 0.05, 0.999, 0.3, 0.7])
    many = torch.cat([scores, scores]).to(DEVICE)
    wanted = torch.cat([top_p, torch.ones(6)])[:, None].to(DEVICE)
    lowest = lowest_kept(many, wanted)
    for row, least in enumerate(top_p.tolist()):
        kept = scores[row] >= lowest[row].cpu()
        assert (kept != reached(scores[row], least)).sum() <= 1, "the border may fall either way by rounding"
    assert bool((lowest[6:] == float("-inf")).all())
    assert torch.equal(lowest_kept(many[2:3], wanted[2:3]), lowest[2:3]), "whatever other rows there are"
