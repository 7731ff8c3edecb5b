"""LoRA adapters of a decoder: read from PEFT's files, kept by name, given to the layers per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
from torch import nn

from segue.engines.autoregressive.contract import FlatBatch, Prompt
from segue.graph.lora import LoraPlan
from segue.kernels.linear import PackedLinear
from segue.kernels.lora import Lora, LoraLinear, Pair, lora_step, wrap_linears
from segue.kernels.quantized import QUANTIZED
from segue.messages.errors import ConfigError, NotFound, nearest
from segue.models.library import Conv1D, PreTrainedModel
from segue.models.peft import read_adapter
from segue.parallel.layers import Divided

LINEARS = (nn.Linear, PackedLinear, Conv1D, *QUANTIZED)


class AdaptersByName:
    """The adapters of one network. Implements `segue.engines.autoregressive.contract.LoraHost`."""

    def __init__(
        self,
        plan: LoraPlan,
        layers: Mapping[str, LoraLinear],
        read: Callable[[Path], Mapping[str, Pair]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Loads what `plan` names. `layers`: those of the network, by name; `read`: the files of an adapter, A and
        scaled B by name of the layer. Raises `ConfigError`."""
        self._plan = plan
        self._layers = layers
        self._read = read
        self._device = device
        self._dtype = dtype
        self._by_name: dict[str, Lora] = {}
        self._serials = count()
        for name, directory in plan.adapters.items():
            self.load(name, directory)

    def reserved_bytes(self, dtype: torch.dtype) -> int:
        """What as many adapters as may be loaded take, at the highest rank and in every layer."""
        widths = sum(layer.in_features + layer.out_features for layer in self._layers.values())
        return self._plan.max_adapters * self._plan.max_rank * widths * dtype.itemsize

    def load(self, name: str, directory: str) -> None:
        """Let requests name it. Raises `ConfigError` where it cannot be, or the name is taken."""
        if name in self._by_name:
            raise ConfigError(f"there is an adapter {name!r} already; unload it first", field="lora_name")
        if len(self._by_name) == self._plan.max_adapters:
            raise ConfigError(
                f"{self._plan.max_adapters} adapters are loaded already (lora.max_adapters); unload one first",
                field="lora_name",
            )
        here = {
            layer: Pair(*(tensor.to(self._device, self._dtype) for tensor in self._layers[layer].own(pair)))
            for layer, pair in self._read(Path(directory)).items()
        }
        # of its own even where a name is loaded again: the files may have changed
        self._by_name[name] = Lora(name, b"lora %d" % next(self._serials), here)

    def unload(self, name: str) -> None:
        """Let no further request name it; those that run with it go on. Unknown names are ignored."""
        self._by_name.pop(name, None)

    @property
    def loaded(self) -> Mapping[str, Lora]:
        """Those that requests can name."""
        return self._by_name

    def named(self, name: str) -> Lora:
        """Raises `NotFound` naming the nearest."""
        if name not in self._by_name:
            raise NotFound(f"there is no LoRA adapter {name!r}{nearest(name, self._by_name)}", field="adapter")
        return self._by_name[name]


class LoraAdapters(AdaptersByName):
    """The adapters of one decoder."""

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, plan: LoraPlan) -> None:
        """Puts a layer over every linear one of `decoder`, and loads what `plan` names. Raises `ConfigError`."""
        self._switch, found = wrap_linears(model, decoder, LINEARS, features)
        layers = named_as_written(model, found)
        super().__init__(
            plan,
            layers,
            lambda directory: read_adapter(directory, layers, plan.max_rank),
            next(model.parameters()).device,
            model.get_input_embeddings().weight.dtype,
        )

    def during(self, batch: FlatBatch) -> AbstractContextManager[None]:
        """Within it, the layers do what the sequences of a batch ask for."""
        spans: list[tuple[Lora | None, int, int]] = []
        end = 0
        for prompt, start, stop in batch.prompts:
            begin, end = end, end + stop - start
            lora = None if prompt is None else prompt.adapter
            assert lora is None or isinstance(lora, Lora)
            spans.append((lora, begin, end))
        return self._switch.during(lora_step(spans, self._device))


def named_as_written(model: nn.Module, layers: Mapping[str, LoraLinear]) -> dict[str, LoraLinear]:
    """The layers by the names they have in files: not those of their places in what divides them among ranks."""
    named = {}
    for place, layer in layers.items():
        holder, _, _ = place.rpartition(".")
        divided = model.get_submodule(holder)
        if isinstance(divided, Divided):
            layer.name, layer.share = holder, divided.share
        named[layer.name] = layer
    return named


def named_adapter(adapters: AdaptersByName | None, name: str | None) -> Lora | None:
    """The adapter of a request that names one, or none. Raises `NotFound`."""
    if name is None:
        return None
    if adapters is None:
        raise NotFound(f"there is no LoRA adapter {name!r}: this stage takes none", field="adapter")
    return adapters.named(name)


def with_adapter(prompt: Prompt, lora: Lora) -> Prompt:
    """The prompt of a request that is served with an adapter: what is cached of it is of no use to others."""
    identity: list[int | bytes] = list(prompt.token_ids if prompt.identity is None else prompt.identity)
    if identity:  # a block's hash goes on from those before it, so the first token tells for all
        first = identity[0]
        identity[0] = lora.identity + (b" i%d" % first if isinstance(first, int) else b" b" + first)
    return replace(prompt, adapter=lora, identity=identity)


def features(layer: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of one of `LINEARS`; the weight of GPT-2's lies the other way round."""
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    return int(layer.in_features), int(layer.out_features)  # type: ignore[arg-type]
