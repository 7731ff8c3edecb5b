"""Run a text decoder of transformers that accepts no attention function, only a cache of keys and values (BLOOM,
Falcon, GPT-J, …): the counterpart of `PagedDecoder` for such models.

The library's own layers attend over keys and values gathered from their KV blocks. Decoding sequences form one padded
batch, as in the library's `generate`; each prompt chunk is a separate call. This costs more than paged attention and
gives the same results.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from segue.engines.autoregressive.contract import FlatBatch, KVSpec
from segue.kernels.attention.gathered_cache import GatheredCache
from segue.kernels.attention.paged_step import PagedStep
from segue.kernels.kv.layout import LayerShape
from segue.kernels.linear.layers import rounds
from segue.kernels.prepare import DECODE_ROWS, Plan, bypassed, prepare, prepared_bytes
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.decoder import COARSE, check_same, head_of, probe_ids, quantize
from segue.models.shared.decoder.interface import cannot_be_served, decoder_of, name_of
from segue.models.shared.decoder.states import keeps_states
from segue.models.shared.library import VERSION, DynamicCache, ModelOutput, PreTrainedModel

_WANTED = ("inputs_embeds", "past_key_values", "attention_mask", "use_cache")
"""Arguments that such a decoder's forward must accept."""


def attends_itself(model: PreTrainedModel) -> bool:
    """Whether a model does not support the library's attention interface, and keeps only keys and values."""
    return not decoder_of(model)._supports_attention_backend and not keeps_states(model.config)


class GatheredDecoder:
    """Embedding, decoder and head of one causal LM on one device."""

    lora = None

    def __init__(self, model: PreTrainedModel, *, quantization: str = "none") -> None:
        """Raises `ConfigError` with the model and the reason if the model cannot be served."""
        self._kind = type(model).__name__
        decoder = decoder_of(model)
        self._parameters = frozenset(inspect.signature(decoder.forward).parameters)
        if not self._parameters.issuperset(_WANTED):
            raise self._unserved()
        if "alibi" in model.config and model.config.alibi:
            raise ConfigError(
                f"{self._kind} of transformers {VERSION} cannot be served with `alibi`: the library's implementations "
                "of its attention give different results with it",
                field="architectures",
            )
        quantize(self._kind, decoder, quantization, model.device)
        self.model = decoder
        self._embedding = model.get_input_embeddings()
        weight: torch.Tensor = self._embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size: int = model.config.vocab_size
        name = name_of(decoder, model)
        made: list[type[ModelOutput]] = []
        hook = decoder.register_forward_hook(lambda module, given, out: made.append(type(out)))
        ids = probe_ids(self.vocab_size, self.device)
        cache = DynamicCache(config=model.config)
        try:
            with torch.inference_mode(), bypassed(model) as read:
                theirs = model(input_ids=ids[None], past_key_values=cache, use_cache=True).logits[0].float()
        finally:
            hook.remove()
        self.kv = self._spec(cache, model.config.num_hidden_layers)
        prepare(model, self.device, Plan(rows=DECODE_ROWS, keep=read))
        self._head = head_of(model, name, made[0])
        ours = self.logits(self.forward(self.embed(ids), FlatBatch(ids, None, torch.arange(len(ids))[None], None)))
        check_same(self._kind, ours, theirs, self.dtype, coarse=quantization in COARSE or rounds(decoder))
        held = nn.ModuleList([decoder, self._head])
        self.weight_bytes = held_bytes(held) + prepared_bytes(held)

    reads_ids = False
    """Its layers look up token ids in addition to the embeddings."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, H]."""
        rows: torch.Tensor = self._embedding(token_ids)
        return rows

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> torch.Tensor:
        """[tokens, H] → final hidden states [tokens, H]. Raises `ConfigError` for unsupported kinds of steps."""
        step, places = batch.attention, batch.positions[0].to(self.device)
        if step is None:
            return self._run(embeds[None], places[None], None)[0]
        if not isinstance(step, PagedStep):
            raise ConfigError(
                f"{self._kind} of transformers {VERSION} uses its own attention, which cannot be made deterministic",
                field="deterministic",
            )
        hidden = []
        for group in step.decodes:
            own = slice(group.begin, group.end)
            cache = GatheredCache(step, group.begin, group.end, group.blocks, [part.stop for part in group.parts])
            hidden.append(self._run(embeds[own, None], places[own, None], cache)[:, 0])
        for chunk in step.chunks:
            own = slice(chunk.begin, chunk.end)
            cache = GatheredCache(step, chunk.begin, chunk.end, chunk.blocks, [chunk.part.stop])
            hidden.append(self._run(embeds[None, own], places[None, own], cache)[0])
        return torch.cat(hidden)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()

    def _run(self, rows: torch.Tensor, places: torch.Tensor, cache: GatheredCache | None) -> torch.Tensor:
        """[batch, tokens, H], [batch, tokens] → [batch, tokens, H]."""
        others: dict[str, Any] = {} if cache is None else {"past_key_values": cache, "attention_mask": cache.mask}
        if "position_ids" in self._parameters:
            others["position_ids"] = places
        hidden: torch.Tensor = self.model(inputs_embeds=rows, use_cache=cache is not None, **others).last_hidden_state
        return hidden

    def _spec(self, cache: DynamicCache, count: int) -> KVSpec:
        kept = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
        if len(cache.layers) != count or any(part is None for parts in kept for part in parts):
            raise self._unserved()
        shapes = tuple(
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in zip(*kept, strict=True)
        )
        first = shapes[0]
        return KVSpec(
            layers=count,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            value_dim=first.value_dim,
            dtype=self.dtype,
            shapes=() if set(shapes) == {first} else shapes,
            gathered=True,
        )

    def _unserved(self) -> ConfigError:
        return cannot_be_served(
            self._kind,
            "it supports neither AttentionInterface nor a cache of keys and values",
        )
