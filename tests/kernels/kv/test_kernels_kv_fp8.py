"""Keys and values in float8_e4m3fn: what is read is what was written, rounded once, whoever reads it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_attention import ReferenceAttention, TorchAttention
from segue.kernels.attention.paged_step import AttentionBackend, Part, paged_step
from segue.kernels.kv.layout import LayerShape, lay_out, uniform
from segue.kernels.kv.store import KVStore

pytestmark = pytest.mark.slow

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
SIZE = 4


def store(dtype: torch.dtype = torch.float32, stored: torch.dtype | None = FP8, heads: int = 2) -> KVStore:
    return KVStore(uniform(2, heads, 16), num_blocks=24, block_size=SIZE, dtype=dtype, stored=stored, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_read_is_written_rounded_once(dtype: torch.dtype) -> None:
    kept = store(dtype)
    given = (torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    given[0, 0, :4] = torch.tensor([1e4, -1e4, 448.0, float("nan")]).to(dtype)
    kept.write(1, torch.arange(8, 16), given, -given)
    keys, values = kept.read(1, torch.tensor([2, 3]), 1)
    assert keys.dtype == values.dtype == dtype
    rounded = given.clamp(-448, 448).to(FP8).to(dtype)
    torch.testing.assert_close(keys[0].transpose(0, 1), rounded, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values[0].transpose(0, 1), -rounded, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(kept.as_kept(given), rounded, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(keys[0, :, 1:], given.transpose(0, 1)[:, 1:].contiguous(), rtol=2**-4, atol=2**-10)
    kept.copy([(2, 5)])
    torch.testing.assert_close(kept.read(1, torch.tensor([5]), 1)[0], keys[:, :, :SIZE], equal_nan=True)
    kept.scrub([2])
    kept.scrub_slots(torch.tensor([12]))
    assert not kept.read(1, torch.tensor([2]), 1)[0].any()
    assert not kept.read(1, torch.tensor([3]), 1)[1][0, :, 0].any()
    assert kept.read(1, torch.tensor([3]), 1)[1][0, :, 1].all()


def test_layers_of_different_widths_share_tensors() -> None:
    layout = lay_out([LayerShape(2, 16, 16), LayerShape(1, 8, 24)], [None, 7])
    kept = KVStore(layout, num_blocks=4, block_size=SIZE, dtype=torch.float32, stored=FP8, device=CPU)
    keys, values = torch.full((2, 1, 8), 3.0), torch.full((2, 1, 24), -5.0)
    kept.write(1, torch.tensor([4, 6]), keys, values)
    read = kept.read(1, torch.tensor([1]), 1)
    assert read[0][0, 0, :, 0].tolist() == [3, 0, 3, 0]
    assert read[1][0, 0, :, 23].tolist() == [-5, 0, -5, 0]


def test_a_quarter_of_the_bytes() -> None:
    assert store().token_bytes(0) * 4 == store(stored=None).token_bytes(0)
    assert store(stored=torch.float32).stored is None


def backends() -> list[object]:
    triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
    return ["torch", pytest.param("triton", marks=triton)]


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("window", [None, 6])
def test_backends_see_what_is_kept(name: str, window: int | None) -> None:
    """Against the reference over exact K and V that are rounded before they are written."""
    backend: AttentionBackend
    if name == "triton":
        from segue.kernels.attention.backends.triton import TritonAttention

        backend = TritonAttention(CPU)
    else:
        backend = TorchAttention()
    random = torch.Generator().manual_seed(3)
    blocks = torch.randperm(24, generator=random).tolist()
    form = AttentionOptions(0.25, window)
    narrow, exact = store(), store(stored=None)
    for spans in (((0, 9), (0, 21)), ((9, 10), (21, 30)), ((10, 11), (30, 31))):
        parts = [Part(blocks[:4], *spans[0]), Part(blocks[8:18], *spans[1])]
        tokens = sum(part.stop - part.start for part in parts)
        q = torch.randn(4, tokens, 16, generator=random)
        k, v = torch.randn(2, 2, tokens, 16, generator=random)
        ours = backend.attend(0, q, k, v, paged_step(narrow, parts), form)
        rounded = ReferenceAttention().attend(
            0, q, narrow.as_kept(k), narrow.as_kept(v), paged_step(exact, parts), form
        )
        torch.testing.assert_close(ours, rounded, rtol=1e-4, atol=1e-5)
        plain = ReferenceAttention().attend(0, q, k, v, paged_step(store(stored=None), parts), form)
        if spans[0][0] == 0:
            assert 1e-3 < float((ours - plain).norm() / plain.norm()) < 0.1
