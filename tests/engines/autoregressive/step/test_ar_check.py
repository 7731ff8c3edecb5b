"""A model whose attention the paged backend cannot do is refused at load, and the others are not."""

from __future__ import annotations

import pytest
import torch
from ar_adapter import SHAPE, ConditionedAdapter, TinyAdapter, randomise, tiny_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

from segue.engines.autoregressive.step.check import check_attention
from segue.kernels.attention.interface import Chunked
from segue.kernels.attention.paged_attention import TorchAttention
from segue.messages.errors import ConfigError


def built(cls, config) -> TinyAdapter:
    model = cls(config).eval()
    randomise(model, 0)
    return TinyAdapter(model)


def mistral(**changes) -> TinyAdapter:
    return built(MistralForCausalLM, MistralConfig(**SHAPE, **changes))


def llama4(**changes) -> TinyAdapter:
    shape = {**SHAPE, "head_dim": 8, "intermediate_size_mlp": 96, "num_local_experts": 2, "moe_layers": [], **changes}
    return built(Llama4ForCausalLM, Llama4TextConfig(**shape))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_plain_causal_models_pass(kind):
    check_attention(TinyAdapter(tiny_model(kind)))
    check_attention(ConditionedAdapter(tiny_model(kind)))


def test_sliding_windows_pass():
    check_attention(mistral(sliding_window=9))


def test_soft_caps_and_alternating_windows_pass():
    config = Gemma2Config(**SHAPE, head_dim=8, sliding_window=12, attn_logit_softcapping=3.0)
    check_attention(built(Gemma2ForCausalLM, config))


def test_sinks_pass():
    config = GptOssConfig(**SHAPE, head_dim=8, sliding_window=12, num_local_experts=2, num_experts_per_tok=1)
    adapter = built(GptOssForCausalLM, config)
    torch.nn.init.normal_(adapter.model.model.layers[0].self_attn.sinks, std=2.0)
    check_attention(adapter)


@pytest.mark.parametrize("size", [8, 16, 100])
def test_chunked_attention_passes_where_the_spec_says_so(size):
    adapter = llama4(attention_chunk_size=size)
    adapter.kv.windows = (Chunked(size),) * 3
    check_attention(adapter)


@pytest.mark.parametrize("size", [8, 100])
def test_chunks_that_the_spec_does_not_know_are_refused(size):
    """Chunks of 100 tokens do not show in 40: the mask itself is asked."""
    adapter = llama4(attention_chunk_size=size)
    wrong = f"layer 0 has {{}}, but the layer itself asks for chunks of {size}"
    with pytest.raises(ConfigError, match=wrong.format("no window")):
        check_attention(adapter)
    for back, said in ((Chunked(16), "chunks of 16"), (size, f"a window of {size}")):
        adapter.kv.windows = (back,) * 3
        with pytest.raises(ConfigError, match=wrong.format(said)):
            check_attention(adapter)


def test_a_window_the_layers_do_not_pass_on_is_refused():
    adapter = mistral(sliding_window=9)
    forward = adapter.model.model.layers[1].self_attn.forward
    config = adapter.model.config

    def forgetful(*args, **kwargs):
        window, config.sliding_window = config.sliding_window, None
        try:
            return forward(*args, **kwargs)
        finally:
            config.sliding_window = window

    adapter.model.model.layers[1].self_attn.forward = forgetful
    with pytest.raises(ConfigError, match=r"by [0-9.]+e[+-]\d+ of the largest value; at most 2e-03 is allowed in"):
        check_attention(adapter)


def test_an_adapter_that_drops_the_paged_argument_is_refused():
    adapter = TinyAdapter(tiny_model())
    forward = adapter.forward

    def without(embeds, batch):
        batch.attention = None
        return forward(embeds, batch)

    adapter.forward = without
    with pytest.raises(ConfigError, match="`paged`"):
        check_attention(adapter)


def test_a_context_too_short_to_check():
    with pytest.raises(ConfigError, match="max_model_len is 12"):
        check_attention(TinyAdapter(tiny_model(), max_model_len=12))


class LargeBlocks(TorchAttention):
    """Takes blocks of at least 128 tokens, as kernels of torch and of FlashAttention do."""

    page = 128

    def attend(self, layer, q, k, v, step, form):
        assert step.store.block_size % self.page == 0
        return super().attend(layer, q, k, v, step, form)


def test_a_backend_gets_blocks_as_large_as_it_needs():
    check_attention(mistral(sliding_window=9), LargeBlocks())
