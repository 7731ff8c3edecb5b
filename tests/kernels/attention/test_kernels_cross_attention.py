"""Attention to what requests were shown: each token over exactly the rows that it sees, zeros where it sees none."""

from __future__ import annotations

import torch

from segue.kernels.attention.cross_attention import CrossStep, Look

HEADS, KV_HEADS, DIM = 6, 2, 8
ROWS = {b"one": 10, b"two": 4}


def test_each_token_over_what_it_sees() -> None:
    made = {key: (torch.randn(KV_HEADS, rows, DIM), torch.randn(KV_HEADS, rows, DIM + 3)) for key, rows in ROWS.items()}
    q = torch.randn(HEADS, 7, DIM)
    sees = {0: ((b"one", 5),), 2: ((b"one", 10), (b"two", 3)), 3: ((b"one", 5),), 5: ((b"two", 4),)}
    looks = [
        Look(torch.tensor([token for token in sees if sees[token] == seen]), seen)
        for seen in dict.fromkeys(sees.values())
    ]
    out = CrossStep(frozenset({4}), looks, lambda layer, key: made[key]).attend(4, q, 0.3)
    assert out.shape == (7, HEADS, DIM + 3)
    for token in range(7):
        if token not in sees:
            assert not out[token].any()
            continue
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            keys = torch.cat([made[key][0][group, :count] for key, count in sees[token]])
            values = torch.cat([made[key][1][group, :count] for key, count in sees[token]])
            weights = (0.3 * keys @ q[head, token]).softmax(-1)
            torch.testing.assert_close(out[token, head], weights @ values)


def test_nothing_is_seen() -> None:
    out = CrossStep(frozenset({0}), [], lambda layer, key: made_up(key)).attend(0, torch.randn(HEADS, 3, DIM), 1.0)
    assert out.shape == (3, HEADS, DIM)
    assert not out.any()


def made_up(key: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError(f"nobody looks at {key!r}")
