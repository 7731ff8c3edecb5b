"""Attention in parts: the joined parts are the whole, and the kernel registered for CPUs is the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.parallel.cpu_flash import attention_with_weight, join, register_cpu_flash


def drawn(seed: int, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, 3, count, 8, generator=generator) for count in (queries, keys, keys))
    return 4 * query, key, value


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), queries=st.integers(1, 9), first=st.integers(1, 9), second=st.integers(1, 9))
def test_joined_parts_are_the_whole(seed: int, queries: int, first: int, second: int) -> None:
    query, key, value = drawn(seed, queries, first + second)
    parts = [
        attention_with_weight(query, key[:, :, some], value[:, :, some], None)
        for some in (slice(0, first), slice(first, None))
    ]
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(join(parts[0], parts[1])[0], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_registered_kernel_is_the_reference(scale: float | None) -> None:
    register_cpu_flash()
    query, key, value = drawn(1, 7, 11)
    out, weight, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
    expected = attention_with_weight(query, key, value, scale)
    torch.testing.assert_close((out, weight), expected, rtol=1e-4, atol=1e-5)
