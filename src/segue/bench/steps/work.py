"""Count the bytes and operations of a language model's step from the shapes of its weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
from accelerate import init_empty_weights

from segue.models.shared.library import AutoConfig, AutoModelForCausalLM


class Work(msgspec.Struct, kw_only=True):
    """The sizes of one model: numbers of weights, without the embedding table, of which one row is read per token."""

    dense: int
    """Weights that every token uses, without the head."""
    head: int
    experts: int
    """Weights of all experts of all layers."""
    share: float
    """Share of the experts that a token uses."""
    attention: int
    """Query heads times their width, over all layers."""
    cached: int
    """Numbers that the KV cache keeps per token."""
    itemsize: int
    """Bytes of a number."""

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes read by a step of `batch` sequences with `context` tokens each. Counts the expected number of used
        experts if each token selects experts uniformly."""
        touched = self.experts * (1 - (1 - self.share) ** batch)
        return self.itemsize * (self.dense + self.head + touched + batch * context * self.cached)

    def decode_flops(self, batch: int, context: float) -> float:
        """Operations of the same step."""
        return batch * (2 * (self.dense + self.head + self.share * self.experts) + 4 * context * self.attention)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt, of which only the last token goes through the head."""
        return 2 * tokens * (self.dense + self.share * self.experts) + 2 * self.head + 2 * tokens**2 * self.attention


def work_of(model_dir: Path, itemsize: int) -> Work:
    """The sizes of a decoder that has full attention in every layer."""
    config = AutoConfig.from_pretrained(model_dir)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = [one for one in model.parameters() if one.ndim > 1 and one is not table and one is not head]
    experts = [one for one in matrices if one.ndim == 3]
    values = config.to_dict()
    width = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    return Work(
        dense=sum(one.numel() for one in matrices if one.ndim == 2),
        head=head.numel(),
        experts=sum(one.numel() for one in experts),
        share=values["num_experts_per_tok"] / experts[0].shape[0] if experts else 0.0,
        attention=config.num_hidden_layers * config.num_attention_heads * width,
        cached=2 * config.num_hidden_layers * config.num_key_value_heads * width,
        itemsize=itemsize,
    )
