"""The text decoder of a model of transformers under paged attention: what the generic families' `llm` stage runs.

The network is the library's own, embedding and head included; only its attention is the engine's. What a family does
around the decoder (Gemma's embedding scale and soft cap, Cohere's and Granite's logit scales, …) is not written here
again: embeddings go in where the library takes `inputs_embeds`, and logits are made by the library's own `forward` with
the decoder in it replaced by one that hands its input through. At load both halves together are compared with the
library's forward from token ids to logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from segue.engines.autoregressive.contract import FlatBatch, KVSpec
from segue.graph.lora import LoraPlan
from segue.kernels.attention_calls import attention_calls
from segue.kernels.experts import PACKED_EXPERTS, pack_experts
from segue.kernels.fused_linear import fuse, siblings
from segue.kernels.fused_norm import fuse_norms
from segue.kernels.gated_mlp import fuse_gates
from segue.kernels.kv_layout import NOTHING
from segue.kernels.linear import DECODE_ROWS, bypassed, pack_linears
from segue.kernels.paged_attention import LibraryRecord, library_attention
from segue.kernels.quantized import packed_bytes, rounds
from segue.kernels.state_cache import StepCache
from segue.messages.errors import ConfigError
from segue.models.checkpoint import held_bytes
from segue.models.decoder_load import COARSE, check_same, probe_ids, quantize
from segue.models.head import head_of
from segue.models.interface import cannot_be_served, check_interface, check_takes, decoder_of, name_of
from segue.models.layer_inputs import READ_AS, takes_ids_again
from segue.models.library import PAGED, ModelOutput, PreTrainedModel
from segue.models.lora import LoraAdapters
from segue.models.no_cache import NoCache, counts_by_cache
from segue.models.states import attending, divide, find_states, keeps_states

HEARD = "encoder_hidden_states"
"""How decoders of encoder-decoders take what the encoder gave: [1, rows, H]."""


@dataclass(slots=True)
class _Theirs:
    """What the library's own forward of a short text gave."""

    logits: torch.Tensor
    """[tokens, vocab] float32"""
    record: LibraryRecord
    counted: bool
    """Calls of attention are told apart by their place in the pass (`segue.kernels.attention_calls`)."""
    given_to_head: type[ModelOutput]
    bypassed: set[str]
    """Linear layers whose weights the model reads itself."""


class PagedDecoder:
    """Embedding, decoder and head of one model on one device.

    `model` is anything of the library whose `forward` ends in logits: a causal LM, or a vision-language model's whole.
    `decoder` is the module in it that maps embeddings to final hidden states (the library's `get_decoder()` unless
    given); `inner`, by its dotted name, the module whose output its `forward` feeds to the head (the decoder unless
    given; in a vision-language model, what holds encoders and decoder together).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: nn.Module | None = None,
        inner: str | None = None,
        *,
        quantization: str = "none",
        lora: LoraPlan | None = None,
        fused: bool = True,
        read_as: Mapping[int, int] = READ_AS,
        rows: Callable[[torch.Tensor], torch.Tensor] | None = None,
        across: frozenset[int] = frozenset(),
        heard: torch.Tensor | None = None,
    ) -> None:
        """`fused`: layers with the same input are one product (`segue.kernels.fused_linear`), where there are no
        adapters. `read_as`: as in `takes_ids_again`. `rows`: what ids [n] are embedded as, where that is not the
        embedding alone. `across`: the layers that look at media and not at tokens, which are left out where a batch
        has none; what they take goes to `forward` as `others`. `heard`: of an encoder-decoder, rows [1, n, H] as its
        encoder gives them, which the short text of the comparison attends to, under the decoder's own name for them.

        Raises `ConfigError` where the model is not one that can be served, naming it and the reason.
        """
        self._kind = type(model).__name__
        decoder = decoder_of(model) if decoder is None else decoder
        self._parameters = frozenset(inspect.signature(decoder.forward).parameters)
        config = model.config.get_text_config(decoder=True)
        stateful = keeps_states(config)
        layers = attending(config) if stateful else frozenset(range(config.num_hidden_layers)) - across
        self._heard = heard
        if layers:
            check_interface(model, decoder, stateful=stateful or heard is not None)
            decoder.set_attn_implementation(PAGED)  # type: ignore[operator]
        else:
            check_takes(self._kind, self._parameters, "inputs_embeds")
        if stateful and lora is not None:
            raise ConfigError(
                f"{self._kind} takes no LoRA adapters: its layers keep a state per sequence", field="lora"
            )
        self.model = decoder
        embedding = model.get_input_embeddings()
        self._rows = embedding if rows is None else rows
        own = name_of(decoder, model)
        inner = own if inner is None else inner
        weight = next(model.parameters())
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = embedding.weight.dtype
        self.vocab_size: int = config.vocab_size
        self._counts = counts_by_cache(config)
        self._by_layer = takes_ids_again(decoder, config, read_as)
        self._coarse = quantization in COARSE or rounds(decoder)
        if fused:
            fuse_norms(decoder)
        theirs = self._theirs(model, inner, fused and lora is None)
        self._counted = theirs.counted
        if quantization != "none":  # products made of several layers, too
            check_same(self._kind, self._library_logits(model), theirs.logits, self.dtype, coarse=False)
            quantize(self._kind, decoder, quantization)
            theirs.logits = self._library_logits(model)
        keep = _beside(model, own, inner) | theirs.bypassed
        states = None
        if stateful:
            with bypassed(model) as read:  # with a cache, other weights may be read than without
                states = find_states(decoder, self.embed(self._probe()), self._parameters)
            keep |= read
        self._cache = None if states is None else states.cache
        count = config.num_hidden_layers
        if self._counted:
            count = len(theirs.record.shapes)
            layers = frozenset(range(count))
        self.kv = replace(
            kv_spec(self._kind, theirs.record, count, self.dtype, layers),
            coarse=self._coarse,
            beside=bool(across) or heard is not None,
            states=None if states is None else states.layout,
        )
        pack_linears(model, DECODE_ROWS, keep=keep)
        if states is not None:
            divide(decoder, states)
        if pack_experts(decoder, DECODE_ROWS):
            decoder.set_experts_implementation(PACKED_EXPERTS)  # type: ignore[operator]
        self.lora = None if lora is None else LoraAdapters(model, decoder, lora)
        self._head = head_of(model, inner, theirs.given_to_head)
        self._compare(theirs.logits)
        held = nn.ModuleList([decoder, self._head])
        self.weight_bytes = held_bytes(held) + packed_bytes(held)
        if self.lora is not None:
            self.weight_bytes += self.lora.reserved_bytes(self.dtype)

    @property
    def reads_ids(self) -> bool:
        """Its layers look up ids, besides the embeddings that they get."""
        return self._by_layer is not None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, H]."""
        return self._rows(token_ids)

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch, **others: Any) -> torch.Tensor:
        """[tokens, H] → final hidden states [tokens, H]. `others`: what the decoder takes besides."""
        positions = batch.positions if len(batch.positions) == 1 else batch.positions[:, None]
        if "position_ids" in self._parameters:
            others["position_ids"] = positions
        if batch.states is not None:
            assert self._cache is not None
            others[self._cache] = StepCache(batch.states)
        elif self._counts:
            others["past_key_values"] = NoCache(batch.positions[0])
        if self._by_layer is not None:
            others["per_layer_inputs"] = self._by_layer(batch.token_ids[None], embeds[None])
        adapters = nullcontext() if self.lora is None else self.lora.during(batch)
        with adapters, attention_calls(batch.attention, counted=self._counted):
            return self.model(
                inputs_embeds=embeds[None], use_cache=False, paged=batch.attention, **others
            ).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        return self._head(**self._given("inputs_embeds", hidden), use_cache=False).logits[0].float()

    @torch.inference_mode()
    def _theirs(self, model: PreTrainedModel, inner: str, fused: bool) -> _Theirs:
        """Run a short text whole, by the library's forward; then its layers may be `fused`."""
        made: list[type[ModelOutput]] = []
        hook = model.get_submodule(inner).register_forward_hook(lambda module, given, out: made.append(type(out)))
        try:
            with library_attention() as record, siblings(self.model) as found, bypassed(model) as read:
                logits, calls = self._whole(model, counted=False)
            counted = calls > len(record.shapes)  # some layer called attention more than once
            if counted:
                with library_attention() as record:
                    self._whole(model, counted=True)
        except (TypeError, AttributeError) as error:
            raise self._unserved(error) from error
        finally:
            hook.remove()
        if fused:
            fuse(self.model, found)
            fuse_gates(self.model)
        return _Theirs(logits, record, counted, made[0], read)

    @torch.inference_mode()
    def _library_logits(self, model: PreTrainedModel) -> torch.Tensor:
        """Those of the short text [tokens, vocab], of the library's forward over layers as they are by now."""
        with library_attention():
            return self._whole(model, counted=self._counted)[0]

    def _whole(self, model: PreTrainedModel, *, counted: bool) -> tuple[torch.Tensor, int]:
        """(logits [tokens, vocab] of the short text, calls of attention)."""
        with attention_calls(None, counted=counted) as calls:
            return model(**self._given("input_ids", self._probe()), use_cache=False).logits[0].float(), calls.made

    @torch.inference_mode()
    def _compare(self, theirs: torch.Tensor) -> None:
        """Run the short text through our halves; `theirs`: the logits [tokens, vocab] of the library's forward."""
        ids = self._probe()
        positions = torch.arange(len(ids), device=self.device)[None]
        others = {} if self._heard is None else {HEARD: self._heard}
        try:
            with library_attention():
                hidden = self.forward(self.embed(ids), FlatBatch(ids, None, positions, None), **others)
                ours = self.logits(hidden)
        except (TypeError, AttributeError) as error:
            raise self._unserved(error) from error
        check_same(self._kind, ours, theirs, self.dtype, coarse=self._coarse)

    def _given(self, name: str, text: torch.Tensor) -> dict[str, Any]:
        """What the model's own forward is given for a text: [tokens] ids, or [tokens, H] rows."""
        if self._heard is None:
            return {name: text[None]}
        return {f"decoder_{name}": text[None], "encoder_outputs": (self._heard,)}

    def _probe(self) -> torch.Tensor:
        """[tokens] ids of the short text."""
        return probe_ids(self.vocab_size, self.device)

    def _unserved(self, error: Exception) -> ConfigError:
        return cannot_be_served(self._kind, f"its decoder or its head does not take what the engine gives it ({error})")


def kv_spec(kind: str, record: LibraryRecord, layers: int, dtype: torch.dtype, attending: frozenset[int]) -> KVSpec:
    """The KV cache of a decoder from what its layers gave to attention. `attending`: those that
    keep keys and values; others keep a state, or nothing. Raises `ConfigError`."""
    without = sorted(attending - record.shapes.keys())
    if without:
        raise ConfigError(
            f"{kind} cannot be served: {len(without)} of its {layers} layers (the first is {without[0]}) attend, but "
            "not through the library's AttentionInterface, or not under their own number",
            field="architectures",
        )
    shapes = tuple(record.shapes.get(layer, NOTHING) for layer in range(layers))
    first = shapes[0]
    return KVSpec(
        layers=layers,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        value_dim=first.value_dim,
        dtype=dtype,
        windows=tuple(record.windows.get(layer) for layer in range(layers)),
        shapes=() if set(shapes) == {first} else shapes,
    )


def _beside(model: nn.Module, decoder: str, inner: str) -> set[str]:
    """What is in `inner` and not in the decoder nor around it: encoders, which do not run here."""
    names = (name for name, _ in model.named_modules())
    return {
        name
        for name in names
        if name.startswith(f"{inner}.")
        and not f"{name}.".startswith(f"{decoder}.")
        and not decoder.startswith(f"{name}.")
    }
