"""Runs the text decoder of a transformers model under paged attention: the `llm` stage of the generic families.

The network is the library's own, embedding and head included; only its attention is the engine's. Operations around the
decoder (Gemma's embedding scale and soft cap, Cohere's and Granite's logit scales, …) are not reimplemented: embeddings
enter as the library's `inputs_embeds`, and the library's own `forward` computes the logits, with the decoder inside it
replaced by a module that returns its input. At load, logits of a short text computed from embeddings are compared with
the library's logits from token ids. This module also quantises a decoder's weights at load.
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
from segue.graph.deployment.options import LoraPlan
from segue.kernels.attention.calls import attention_calls
from segue.kernels.attention.paged_attention import LibraryRecord, library_attention
from segue.kernels.kv.layout import NOTHING
from segue.kernels.kv.state_cache import StepCache
from segue.kernels.linear.layers import rounds
from segue.kernels.prepare import DECODE_ROWS, Plan, bypassed, prepare, prepared_bytes, siblings
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.interface import cannot_be_served, check_interface, check_takes, decoder_of, name_of
from segue.models.shared.decoder.layer_inputs import READ_AS, takes_ids_again
from segue.models.shared.decoder.no_cache import NoCache, counts_by_cache
from segue.models.shared.decoder.states import attending, divide, find_states, keeps_states
from segue.models.shared.decoder.tolerance import difference, tolerance
from segue.models.shared.library import FLAT, PAGED, Conv1D, ModelOutput, PreTrainedConfig, PreTrainedModel
from segue.models.shared.lora import LoraAdapters


def head_of(model: PreTrainedModel, inner: str, given: type[ModelOutput]) -> nn.Module:
    """A copy of `model` in which the submodule `inner` (dotted), whose output feeds the head, returns its own input as
    a `given`. `model` itself is unchanged."""
    return _replaced(model, inner, _HandedThrough(given, model.get_submodule(inner)))


class _HandedThrough(nn.Module):
    """Stands in for a decoder: returns its input, in the decoder's output class."""

    def __init__(self, kind: type[ModelOutput], replaced: nn.Module) -> None:
        super().__init__()
        # the head reads these numbers from the decoder (Falcon-H1's multiplier)
        self.__dict__.update({name: value for name, value in vars(replaced).items() if isinstance(value, int | float)})
        self._kind = kind

    def forward(self, input_ids: None = None, *, inputs_embeds: torch.Tensor, **others: Any) -> ModelOutput:
        """[1, rows, H] → the same, as the last hidden state."""
        return self._kind(last_hidden_state=inputs_embeds)


def _replaced(module: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """A module that shares everything with `module` except that its submodule `name` (dotted) is `new`; `module` itself
    is unchanged."""
    first, _, rest = name.partition(".")
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    child = module.get_submodule(first)
    clone._modules[first] = _replaced(child, rest, new) if rest else new
    return clone


_PROBE = 24
"""Tokens of the short text that the load check runs."""
_COARSE_TOLERANCE = 0.3
COARSE = ("bfloat16", "int8", "int4")
"""Quantisations that also round a layer's input; `int4` does so only without compiled kernels."""


def probe_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    """[tokens] ids of a short text for the load check."""
    return (torch.arange(_PROBE, device=device) * 7919 + 1) % vocab_size


def check_same(kind: str, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, *, coarse: bool) -> None:
    """Raise `ConfigError` if two computations of a short text's logits [tokens, vocab] in `dtype` differ by more than
    the tolerance. `coarse`: activations were rounded."""
    off, most = difference(ours, theirs), _COARSE_TOLERANCE if coarse else tolerance(dtype)
    if not off <= most:
        raise ConfigError(
            f"{kind} cannot be served: its logits from token ids differ from those from embeddings by "
            f"{off:.1e} (at most {most:.0e}); it does more with the ids than embed them once",
            field="architectures",
        )


def quantize(kind: str, decoder: nn.Module, quantization: str, device: torch.device) -> None:
    """Quantise the linear layers of a decoder. Raises `ConfigError` if it has none that can be quantised."""
    plan = Plan(quantization=quantization, weights=_weights)
    if not prepare(decoder, device, plan) and quantization != "none":
        raise ConfigError(
            f"quantization is {quantization!r}, but {kind} has no linear layer that can be quantised this way",
            field="quantization",
        )


def _weights(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight [outputs, inputs] and bias of a plain linear layer, None for any other module."""
    if type(module) is nn.Linear and "forward" not in vars(module):
        return module.weight, module.bias
    if type(module) is Conv1D:
        return module.get_parameter("weight").T.contiguous(), module.get_parameter("bias")
    return None


ENCODER_STATES = "encoder_hidden_states"
"""The argument by which decoders of encoder-decoder models take the encoder states: [1, rows, H]."""


@dataclass(slots=True)
class _Theirs:
    """The result of the library's own forward on a short text."""

    logits: torch.Tensor
    """[tokens, vocab] float32"""
    record: LibraryRecord
    counted: bool
    """Attention calls are identified by their order in the pass (`segue.kernels.attention.calls`)."""
    given_to_head: type[ModelOutput]
    bypassed: set[str]
    """Linear layers whose weights the model reads directly."""


class PagedDecoder:
    """Embedding, decoder and head of one model on one device.

    `model` is any library model whose `forward` returns logits: a causal LM, or a whole vision-language model.
    `decoder` is its submodule that maps embeddings to final hidden states (default: the library's `get_decoder()`);
    `inner` is the dotted name of the module whose output feeds the head (default: the decoder; in a vision-language
    model, the module that contains encoders and decoder).
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
        encoder_states: torch.Tensor | None = None,
        head: str | None = None,
        of_ids: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None,
        config: PreTrainedConfig | None = None,
    ) -> None:
        """`fused`: run layers with the same input as one matmul, unless there are LoRA adapters. `read_as`: as in
        `takes_ids_again`. `rows`: embeds ids [n], if the embedding alone does not. `across`: the cross-attention
        layers, which are skipped if a batch has no media; their inputs go to `forward` as `others`.
        `encoder_states`: for an encoder-decoder model, [1, n, H] that the load check's short text attends to. `head`:
        the dotted name of the layer that maps final hidden states to logits, if it is a single one: needed if the
        model's own forward of embeddings does more than run decoder and head. `of_ids`: the arguments of its forward
        for a text of ids [n] in the load check, if they are not the ids alone. `config`: the decoder's, if the model's
        does not name it.

        Raises `ConfigError` with the model and the reason if the model cannot be served.
        """
        self._kind = type(model).__name__
        decoder = decoder_of(model) if decoder is None else decoder
        self._parameters = frozenset(inspect.signature(decoder.forward).parameters)
        config = model.config.get_text_config(decoder=True) if config is None else config
        stateful = keeps_states(config)
        layers = attending(config) if stateful else frozenset(range(config.num_hidden_layers)) - across
        self._encoder_states, self._of_ids = encoder_states, of_ids
        self._attends = bool(layers)
        if layers:
            check_interface(model, decoder, stateful=stateful or encoder_states is not None)
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
            prepare(decoder, self.device, Plan(recognised=True))
        theirs = self._theirs(model, inner, fused and lora is None)
        self._counted = theirs.counted
        if quantization != "none":  # including the joined layers
            check_same(self._kind, self._library_logits(model), theirs.logits, self.dtype, coarse=False)
            quantize(self._kind, decoder, quantization, self.device)
            theirs.logits = self._library_logits(model)
        keep = _outside(model, own, inner) | theirs.bypassed
        states = None
        if stateful:
            with bypassed(model) as read:  # with a cache, the model may read other weights directly than without
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
            cross_attends=bool(across) or encoder_states is not None,
            states=None if states is None else states.layout,
        )
        prepare(model, self.device, Plan(rows=DECODE_ROWS, keep=keep, experts=decoder))
        if states is not None:
            divide(decoder, states)
        self.lora = None if lora is None else LoraAdapters(model, decoder, lora)
        self._plain_head = head is not None
        self._head = head_of(model, inner, theirs.given_to_head) if head is None else model.get_submodule(head)
        self._compare(theirs.logits)
        held = nn.ModuleList([decoder, self._head])
        self.weight_bytes = held_bytes(held) + prepared_bytes(held)
        if self.lora is not None:
            self.weight_bytes += self.lora.reserved_bytes(self.dtype)

    @property
    def reads_ids(self) -> bool:
        """Its layers look up token ids in addition to the embeddings."""
        return self._by_layer is not None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, H]."""
        return self._rows(token_ids)

    @torch.inference_mode()
    def forward(self, embeds: torch.Tensor, batch: FlatBatch, **others: Any) -> torch.Tensor:
        """[tokens, H] → final hidden states [tokens, H]. `others`: further arguments of the decoder."""
        positions = batch.positions if len(batch.positions) == 1 else batch.positions[:, None]
        if "position_ids" in self._parameters:
            others["position_ids"] = positions
        if batch.states is not None:
            assert self._cache is not None
            others[self._cache] = StepCache(batch.states)
        elif self._counts:
            others["past_key_values"] = NoCache(batch.positions[0])
        adapters = nullcontext() if self.lora is None else self.lora.during(batch)
        name = PAGED if batch.attention is None else FLAT
        config: Any = self.model.config
        if self._attends and config._attn_implementation != name:
            config._attn_implementation = {"": name}  # its own, not those of configs within it
        with adapters, attention_calls(batch.attention, counted=self._counted):
            if self._by_layer is not None:
                others["per_layer_inputs"] = self._by_layer(batch.token_ids[None], embeds[None])
            return self.model(
                inputs_embeds=embeds[None], use_cache=False, paged=batch.attention, **others
            ).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] → [rows, vocab] float32."""
        if self._plain_head:
            return self._head(hidden).float()
        return self._head(**self._given("inputs_embeds", hidden), use_cache=False).logits[0].float()

    @torch.inference_mode()
    def _theirs(self, model: PreTrainedModel, inner: str, fused: bool) -> _Theirs:
        """Run a short text through the library's whole forward; afterwards join layers if `fused`."""
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
            prepare(self.model, self.device, Plan(recognised=True, shared=found))
        return _Theirs(logits, record, counted, made[0], read)

    @torch.inference_mode()
    def _library_logits(self, model: PreTrainedModel) -> torch.Tensor:
        """The short text's logits [tokens, vocab] by the library's forward, over the layers in their current form."""
        with library_attention():
            return self._whole(model, counted=self._counted)[0]

    def _whole(self, model: PreTrainedModel, *, counted: bool) -> tuple[torch.Tensor, int]:
        """(logits [tokens, vocab] of the short text, calls of attention)."""
        with attention_calls(None, counted=counted) as calls:
            ids = self._probe()
            given = self._given("input_ids", ids) if self._of_ids is None else self._of_ids(ids)
            return model(**given, use_cache=False).logits[0].float(), calls.made

    @torch.inference_mode()
    def _compare(self, theirs: torch.Tensor) -> None:
        """Check our split computation of the short text against `theirs`: logits [tokens, vocab] of the library's
        forward."""
        ids = self._probe()
        positions = torch.arange(len(ids), device=self.device)[None]
        others = {} if self._encoder_states is None else {ENCODER_STATES: self._encoder_states}
        try:
            with library_attention():
                hidden = self.forward(self.embed(ids), FlatBatch(ids, None, positions, None), **others)
                ours = self.logits(hidden)
        except (TypeError, AttributeError) as error:
            raise self._unserved(error) from error
        check_same(self._kind, ours, theirs, self.dtype, coarse=self._coarse)

    def _given(self, name: str, text: torch.Tensor) -> dict[str, Any]:
        """Arguments of the model's own forward for a text: [tokens] ids, or [tokens, H] rows."""
        if self._encoder_states is None:
            return {name: text[None]}
        return {f"decoder_{name}": text[None], "encoder_outputs": (self._encoder_states,)}

    def _probe(self) -> torch.Tensor:
        """[tokens] ids of the load check's short text."""
        return probe_ids(self.vocab_size, self.device)

    def _unserved(self, error: Exception) -> ConfigError:
        return cannot_be_served(self._kind, f"its decoder or its head does not accept the engine's inputs ({error})")


def kv_spec(kind: str, record: LibraryRecord, layers: int, dtype: torch.dtype, attending: frozenset[int]) -> KVSpec:
    """The KV cache spec of a decoder, from the keys and values that its layers passed to attention. `attending`: the
    layers that keep keys and values; others keep a state, or nothing. Raises `ConfigError`."""
    without = sorted(attending - record.shapes.keys())
    if without:
        raise ConfigError(
            f"{kind} cannot be served: {len(without)} of its {layers} layers (the first is {without[0]}) attend, but "
            "not through the library's AttentionInterface, or not under their own layer index",
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


def _outside(model: nn.Module, decoder: str, inner: str) -> set[str]:
    """The modules of `inner` outside the decoder and its ancestors: encoders, which do not run here."""
    names = (name for name, _ in model.named_modules())
    return {
        name
        for name in names
        if name.startswith(f"{inner}.")
        and not f"{name}.".startswith(f"{decoder}.")
        and not decoder.startswith(f"{name}.")
    }
