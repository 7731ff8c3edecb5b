"""The KV cache in FP8: close to the exact model, the same answers however they are served, a quarter of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from causal_lm_family import Served, load, make, prompts

from segue.engines.autoregressive.cache.memory import blocks_for, bytes_per_block, stored_as
from segue.engines.autoregressive.contract import FlatBatch
from segue.kernels.attention.paged_step import Part, paged_step
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError
from segue.models.text.causal_lm.llm import LLM

PROMPTS = prompts()[:20]
TOKENS = 10


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2"])
def adapter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return load(make(request.param, tmp_path_factory.mktemp(request.param)))


def test_the_same_answers_however_served(adapter: LLM) -> None:
    """Alone, in a batch, in pieces, after prefix hits and preemption."""
    alone = [Served(adapter, kv_dtype="fp8").run([prompt], TOKENS)[0] for prompt in PROMPTS]
    assert len({tuple(answer) for answer in alone if len(answer) > 2}) > 8
    served = Served(adapter, kv_dtype="fp8", max_tokens_per_step=48)
    assert served.run(PROMPTS, TOKENS) == alone
    assert served.run(PROMPTS, TOKENS) == alone
    groups = adapter.kv.layout(adapter.max_model_len).groups
    tight = Served(adapter, kv_dtype="fp8", num_blocks=14 * groups, max_tokens_per_step=64)
    assert tight.run(PROMPTS, TOKENS) == alone
    assert tight.engine.stats()["preemptions_total"] > 0
    exact = Served(adapter).run(PROMPTS, TOKENS)
    assert exact != alone, "the cache is rounded"
    assert sum(a[0] == b[0] for a, b in zip(exact, alone, strict=True)) > 12


def test_logits_are_close(adapter: LLM) -> None:
    ids = (torch.arange(48) * 7919 + 1) % 600
    found = []
    for kv_dtype in ("auto", "fp8"):
        spec = stored_as(adapter.kv, kv_dtype)
        store = KVStore(
            spec.layout(1), num_blocks=6, block_size=8, dtype=spec.dtype, stored=spec.stored, device=adapter.device
        )
        step = paged_step(store, [Part(range(6), 0, 48)])
        with torch.inference_mode():
            hidden, _ = adapter.forward(adapter.embed(ids, None), FlatBatch(ids, None, torch.arange(48)[None], step))
            found.append(adapter.logits(hidden))
    exact, ours = found
    assert 1e-4 < float((ours - exact).norm() / exact.norm()) < 0.3


def test_memory(adapter: LLM) -> None:
    layout = adapter.kv.layout(adapter.max_model_len)
    small = stored_as(adapter.kv, "fp8")
    assert bytes_per_block(small, layout, 16) * 4 == bytes_per_block(adapter.kv, layout, 16)
    assert blocks_for(1 << 20, small, layout, 16) >= 4 * blocks_for(1 << 20, adapter.kv, layout, 16)


def test_what_cannot_be(adapter: LLM) -> None:
    with pytest.raises(ConfigError, match="kv_dtype is 'fp4'; it must be one of auto, fp8"):
        Served(adapter, kv_dtype="fp4")


@pytest.mark.usefixtures("two_threads")
def test_deterministic_stages_too(tmp_path: Path) -> None:
    adapter = load(make("llama", tmp_path))
    alone = [Served(adapter, kv_dtype="fp8", deterministic=True).run([prompt], 3)[0] for prompt in PROMPTS[8:10]]
    assert Served(adapter, kv_dtype="fp8", deterministic=True).run(PROMPTS[8:10], 3) == alone
