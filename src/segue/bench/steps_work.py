"""What a step of a language model has to read and to compute, counted from the shapes of its weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
from accelerate import init_empty_weights

from segue.models.library import AutoConfig, AutoModelForCausalLM


class Work(msgspec.Struct, kw_only=True):
    """Of one model. Numbers of weights, apart from the table of embeddings, of which a row is read per token."""

    dense: int
    """That every token goes through, the head apart."""
    head: int
    experts: int
    """Of all experts of all layers."""
    share: float
    """Of the experts, that a token goes through."""
    attention: int
    """Query heads times their width, of all layers."""
    cached: int
    """Numbers that the KV cache keeps of a token."""
    itemsize: int
    """Bytes of a number."""

    def decode_bytes(self, batch: int, context: float) -> float:
        """Read by a step of `batch` sequences that see `context` tokens each. Of the experts, those that tokens are
        expected to go to if each goes anywhere with equal chance."""
        touched = self.experts * (1 - (1 - self.share) ** batch)
        return self.itemsize * (self.dense + self.head + touched + batch * context * self.cached)

    def decode_flops(self, batch: int, context: float) -> float:
        """Of the same step."""
        return batch * (2 * (self.dense + self.head + self.share * self.experts) + 4 * context * self.attention)

    def prefill_flops(self, tokens: int) -> float:
        """Of a prompt, whose last token alone goes through the head."""
        return 2 * tokens * (self.dense + self.share * self.experts) + 2 * self.head + 2 * tokens**2 * self.attention


def work_of(model_dir: Path, itemsize: int) -> Work:
    """Of a decoder that attends in every layer, to all of its tokens."""
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
