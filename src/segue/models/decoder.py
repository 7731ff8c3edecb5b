"""The text decoder of a model of transformers under paged attention: what the generic families' `llm` stage runs.

The network is the library's own, embedding and head included; only its attention is the engine's. What a family does
around the decoder (Gemma's embedding scale and soft cap, Cohere's and Granite's logit scales, …) is not written here
again: embeddings go in where the library takes `inputs_embeds`, and logits are made by the library's own `forward` with
the decoder in it replaced by one that hands its input through. At load both halves together are compared with the
library's forward from token ids to logits.
"""

from __future__ import annotations

import copy
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
from segue.kernels.quantized import packed_bytes, quantize_linears
from segue.kernels.state_cache import StepCache
from segue.messages.errors import ConfigError
from segue.models.checkpoint import held_bytes
from segue.models.interface import check_interface, check_takes, decoder_of
from segue.models.layer_inputs import READ_AS, takes_ids_again
from segue.models.library import PAGED, VERSION, Conv1D, ModelOutput, PreTrainedConfig, PreTrainedModel
from segue.models.lora import LoraAdapters
from segue.models.no_cache import NoCache, counts_by_cache
from segue.models.states import attending, divide, find_states, keeps_states

_PROBE = 24
"""Tokens of the comparison at load."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest difference over largest logit; 16-bit types: 0.05; activations rounded to 8 bits: 0.3."""
UNBOUNDED = 8192
"""Tokens of a sequence where neither the config nor the deployment says how many."""
COARSE = ("int8", "int4")
"""Quantisations that round what goes into a layer, too."""


def quantize(kind: str, decoder: nn.Module, quantization: str) -> None:
    """The linear layers of a decoder, as a deployment says. Raises `ConfigError` where there are none."""
    if quantization != "none" and not quantize_linears(decoder, quantization, _plain_linear):
        raise ConfigError(
            f"quantization is {quantization!r}, but {kind} has no linear layer that can be made into that",
            field="quantization",
        )


class HandedThrough(nn.Module):
    """In the place of a decoder: its input is its output, of the class that the decoder's is."""

    def __init__(self, kind: type[ModelOutput], replaced: nn.Module) -> None:
        super().__init__()
        # numbers that the head reads of it (Falcon-H1's multiplier)
        self.__dict__.update({name: value for name, value in vars(replaced).items() if isinstance(value, int | float)})
        self._kind = kind

    def forward(self, input_ids: None = None, *, inputs_embeds: torch.Tensor, **others: Any) -> ModelOutput:
        """[1, rows, H] → the same, as the last hidden state."""
        return self._kind(last_hidden_state=inputs_embeds)


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
    ) -> None:
        """`fused`: layers with the same input are one product (`segue.kernels.fused_linear`), where there are no
        adapters. `read_as`: as in `takes_ids_again`. `rows`: what ids [n] are embedded as, where that is not the
        embedding alone.

        Raises `ConfigError` where the model is not one that can be served, naming it and the reason.
        """
        self._kind = type(model).__name__
        decoder = decoder_of(model) if decoder is None else decoder
        self._parameters = frozenset(inspect.signature(decoder.forward).parameters)
        config = model.config.get_text_config(decoder=True)
        stateful = keeps_states(config)
        layers = attending(config) if stateful else frozenset(range(config.num_hidden_layers))
        if layers:
            check_interface(model, decoder, stateful=stateful)
            decoder.set_attn_implementation(PAGED)  # type: ignore[operator]
        else:
            check_takes(self._kind, self._parameters, "inputs_embeds")
        if stateful and lora is not None:
            raise ConfigError(
                f"{self._kind} takes no LoRA adapters: its layers keep a state per sequence", field="lora"
            )
        quantize(self._kind, decoder, quantization)
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
        self._coarse = quantization in COARSE
        if fused:  # before the comparison: what rounds its inputs to 8 bits makes much of the least difference
            fuse_norms(decoder)
        theirs = self._theirs(model, inner, fused and lora is None)
        self._counted = theirs.counted
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
            states=None if states is None else states.layout,
        )
        pack_linears(model, DECODE_ROWS, keep=keep)
        if states is not None:
            divide(decoder, states)
        if pack_experts(decoder, DECODE_ROWS):
            decoder.set_experts_implementation(PACKED_EXPERTS)  # type: ignore[operator]
        self.lora = None if lora is None else LoraAdapters(model, decoder, lora)
        self._head = replaced(model, inner, HandedThrough(theirs.given_to_head, model.get_submodule(inner)))
        self._compare(theirs.logits)
        held = nn.ModuleList([decoder, self._head])
        self.weight_bytes = held_bytes(held) + packed_bytes(held)
        if self.lora is not None:
            self.weight_bytes += self.lora.reserved_bytes(self.dtype)

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
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()

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

    def _whole(self, model: PreTrainedModel, *, counted: bool) -> tuple[torch.Tensor, int]:
        """(logits [tokens, vocab] of the short text, calls of attention)."""
        with attention_calls(None, counted=counted) as calls:
            return model(input_ids=self._probe()[None], use_cache=False).logits[0].float(), calls.made

    @torch.inference_mode()
    def _compare(self, theirs: torch.Tensor) -> None:
        """Run the short text through our halves; `theirs`: the logits [tokens, vocab] of the library's forward."""
        ids = self._probe()
        positions = torch.arange(_PROBE, device=self.device)[None]
        try:
            with library_attention():
                ours = self.logits(self.forward(self.embed(ids), FlatBatch(ids, None, positions, None)))
        except (TypeError, AttributeError) as error:
            raise self._unserved(error) from error
        check_same(self._kind, ours, theirs, self.dtype, coarse=self._coarse)

    def _probe(self) -> torch.Tensor:
        """[tokens] ids of the short text."""
        return probe_ids(self.vocab_size, self.device)

    def _unserved(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._kind} of transformers {VERSION} cannot be served: its decoder or its head does not take what "
            f"the engine gives it ({error})",
            field="architectures",
        )


def probe_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    """[tokens] ids of a short text."""
    return (torch.arange(_PROBE, device=device) * 7919 + 1) % vocab_size


def check_same(kind: str, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, *, coarse: bool) -> None:
    """Logits [tokens, vocab] of a short text. `coarse`: activations are rounded to 8 bits. Raises `ConfigError`."""
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    tolerance = 0.3 if coarse else _TOLERANCE.get(dtype, 0.05)
    if not difference <= tolerance:
        raise ConfigError(
            f"{kind} cannot be served: its logits from token ids differ from those from embeddings by "
            f"{difference:.1e} (at most {tolerance:.0e}); it does more with the ids than to embed them once",
            field="architectures",
        )


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


def _plain_linear(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight [outputs, inputs] and bias of a linear layer that is nothing more."""
    if type(module) is nn.Linear and "forward" not in vars(module):
        return module.weight, module.bias
    if type(module) is Conv1D:
        return module.get_parameter("weight").T.contiguous(), module.get_parameter("bias")
    return None


def context_length(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence a text config allows, or `wanted` where that is less.

    Rotary scalings that change with the length of the sequence ("longrope", "dynamic") are one for a whole flat batch:
    such a model is served up to the length where the first change comes. Raises `ConfigError` where more is wanted.
    """
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    if longest is None:  # a state is as large after a million tokens
        return wanted or UNBOUNDED
    ropes = config.rope_parameters if "rope_parameters" in config else None
    for rope in [ropes, *(ropes or {}).values()]:
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings")
            longest = min(longest, original or longest)
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"max_model_len is {wanted}; this model can be served up to {longest} tokens", field="max_model_len"
        )
    return wanted or longest


def replaced(module: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """A module that shares everything with `module` but has `new` as its submodule `name` (dotted); `module` stays as
    it is."""
    first, _, rest = name.partition(".")
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    child = module.get_submodule(first)
    clone._modules[first] = replaced(child, rest, new) if rest else new
    return clone


def name_of(part: nn.Module, whole: nn.Module) -> str:
    """The dotted name of a submodule."""
    return next(name for name, module in whole.named_modules() if module is part)


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
