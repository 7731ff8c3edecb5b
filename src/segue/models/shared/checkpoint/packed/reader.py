"""Make the loader of transformers read packed weights: an `HfQuantizer` that the library knows as `segue`.

Before weights are read, a holder of the packed tensors replaces each packed layer: the library finds tensors of these
names there, and reads them unchanged. Afterwards each holder is converted into the served layer, one after the other.
Tensors that the library rearranges while reading (experts, stored one by one and fused in the module) are dequantised
first, one after the other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.checkpoint import Checkpoint
from segue.models.shared.checkpoint.packed.weights import Tensors, Unreadable, Weights
from segue.models.shared.library import (
    Conv1D,
    ConversionOps,
    HfQuantizer,
    PreTrainedModel,
    QuantizationConfigMixin,
    WeightConverter,
    WeightRenaming,
    conversions_of,
    register_quantizer,
    rename_source_key,
)

NAME = "segue"
_STEM = "weight"
"""Name of the tensor in layers that are not packed."""


class Format(Protocol):
    """The format of a layer's tensors."""

    @property
    def leaves(self) -> Mapping[str, str]:
        """The last parts of the tensors' names, by the reader's own names without dots; `weight` may be one of them."""

    @property
    def marks(self) -> frozenset[str]:
        """Reader names that identify a packed layer: each has exactly one of them."""

    def read(self, names: tuple[str, ...], tensors: Tensors, shape: tuple[int, int] | None) -> Weights:
        """The weights of one layer, on the device of its tensors. `names`: of the layer, in the checkpoint and in the
        model; `shape`: (out_features, in_features), if known. Raises `Unreadable`."""


class PackedWeights(QuantizationConfigMixin):
    """The `quantization_config` argument of `from_pretrained`."""

    def __init__(self, format: Format, checkpoint: Checkpoint) -> None:
        self.quant_method = NAME
        self.format = format
        self.checkpoint = checkpoint
        self.layers = _packed_layers(checkpoint, format)
        self.strays: list[str] = []
        """Packed layers that match no layer of the model."""
        self.error: ConfigError | None = None
        """An error met while reading experts: the library swallows such errors."""

    def __deepcopy__(self, memo: Any) -> PackedWeights:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": NAME}

    def read(self, layer: str, names: tuple[str, ...], tensors: Tensors, shape: tuple[int, int] | None) -> Weights:
        """Raises `ConfigError` with the file and tensor."""
        try:
            weights = self.format.read(names, tensors, shape)
            if shape is not None and weights.shape != shape:
                leaf = next(name for name in sorted(self.format.marks) if name in tensors)
                raise Unreadable(leaf, f"is of a weight {list(weights.shape)}; the config asks for {list(shape)}")
        except Unreadable as error:
            self.refuse(layer, error.leaf, error.why, error)
        return weights

    def refuse(self, layer: str, leaf: str, why: str, error: Exception | None = None) -> NoReturn:
        """Raises `ConfigError` with the file and tensor."""
        name = f"{layer}.{self.format.leaves.get(leaf, leaf)}"
        path = self.checkpoint.path_of(name) if name in self.checkpoint else self.checkpoint.directory
        raise ConfigError(f"{path}: tensor {name!r} {why}", field="model") from error


def _packed_layers(checkpoint: Checkpoint, format: Format) -> dict[str, dict[str, str]]:
    """Packed layer → the names of its tensors, by the reader's own names."""
    called = {f".{end}": leaf for leaf, end in format.leaves.items()}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in checkpoint.names:
        end = next((end for end in called if name.endswith(end)), None)
        if end is not None:
            found[name.removesuffix(end)][called[end]] = name
    packed = {layer: names for layer, names in found.items() if set(names) != {_STEM}}
    for _, names in sorted(packed.items()):
        if format.marks.isdisjoint(names):
            [name, *_] = sorted(names.values())
            marks = " or ".join(sorted(format.leaves[mark] for mark in format.marks))
            raise ConfigError(
                f"{checkpoint.path_of(name)}: tensor {name!r} has no {marks}",
                field="model",
            )
    return packed


class _Holder(nn.Module):
    """Replaces a layer until its tensors are read."""

    _is_hf_initialized = True
    """Tells the library not to initialise anything here."""

    def __init__(self, layer: nn.Module, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> None:
        """`tensors` by name, on the meta device; `bias`: the checkpoint's, if the layer has none."""
        super().__init__()
        if _STEM not in tensors:  # some models initialise weights of their submodules by name
            self.weight = torch.empty(0)
            self.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        for name, parameter in layer._parameters.items():
            if name != _STEM and parameter is not None:
                self.register_parameter(name, parameter)
        for name, buffer in layer._buffers.items():
            self.register_buffer(name, buffer)
        if bias is not None:
            self.register_buffer("bias", bias)

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The layer's bias, or the checkpoint's."""
        return self._parameters.get("bias", self._buffers.get("bias"))


class PackedReader(HfQuantizer):
    """Reads the layers of a `PackedWeights`."""

    requires_calibration = False

    def __init__(self, quantization_config: PackedWeights, **kwargs: Any) -> None:
        super().__init__(quantization_config, pre_quantized=True)
        self.packed = quantization_config
        self._held: dict[str, tuple[str, nn.Module]] = {}
        """By module path: the name in the checkpoint, and the layer that was replaced."""
        self._fused: dict[tuple[str, str], list[str]] = defaultdict(list)
        """Checkpoint names of tensors that the library fuses into one, by its name and the pattern."""

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        conversions = conversions_of(model)
        state = model.state_dict()
        shapes = self.packed.checkpoint.shapes()
        places: dict[str, str] = {}
        for layer in sorted(self.packed.layers, key=_natural):
            name, pattern = _place(f"{layer}.{_STEM}", conversions, model.base_model_prefix, state)
            if name not in state:
                self.packed.strays.append(layer)
            elif pattern is not None:
                self._fused[name, pattern].append(layer)
            else:
                places[name.removesuffix(f".{_STEM}")] = layer
        tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
        for place, layer in places.items():
            module = model.get_submodule(place)
            self._check(layer, place, module, tied)
            leaves = {leaf: shapes[name] for leaf, name in self.packed.layers[layer].items()}
            bias = None if module._parameters.get("bias") is not None else shapes.get(f"{layer}.bias")
            model.set_submodule(place, _Holder(module, leaves, bias))
            self._held[place] = layer, module

    def _check(self, layer: str, place: str, module: nn.Module, tied: set[str]) -> None:
        """Raises `ConfigError` if a packed layer's module cannot hold packed weights."""
        leaf = min(self.packed.layers[layer])
        if f"{place}.{_STEM}" in tied:
            self.packed.refuse(layer, leaf, "is there, but by the config its weights are tied to another layer's")
        weight = module._parameters.get(_STEM)
        if weight is None or weight.ndim != 2 or list(module.children()) or module._non_persistent_buffers_set:
            self.packed.refuse(layer, leaf, f"is there, but {type(module).__name__} is not a layer that can be packed")

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Dequantise tensors before the library fuses them."""
        patterns = {pattern for _, pattern in self._fused}
        made = [
            self._dequantising(conversion) if patterns.intersection(conversion.source_patterns) else conversion
            for conversion in weight_conversions
        ]
        dotted = [(leaf, end) for leaf, end in self.packed.format.leaves.items() if leaf != end]
        return [*made, *(WeightRenaming(rf"\.{re.escape(end)}$", f".{leaf}") for leaf, end in dotted)]

    def _dequantising(self, converter: Any) -> Any:
        sources = list(converter.source_patterns)
        if not all(source.endswith(f".{_STEM}") for source in sources):
            [(_, layers), *_] = self._fused.items()
            self.packed.refuse(
                layers[0],
                min(self.packed.layers[layers[0]]),
                "belongs to weights that the library rearranges with others while reading",
            )
        stems = [source.removesuffix(_STEM) for source in sources]
        leaves = sorted({*self.packed.format.leaves, _STEM}, key=lambda leaf: (-len(leaf), leaf))
        made = WeightConverter(
            [stem + leaf for stem in stems for leaf in leaves],
            list(converter._original_target_patterns),
            operations=[_Dequantise(self, stems), *converter.operations],
            force_cpu=converter.force_cpu,
        )
        made.scope_prefix, made.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
        return made

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        for place, (layer, module) in self._held.items():
            holder = model.get_submodule(place)
            assert isinstance(holder, _Holder)
            tensors = {leaf: holder._buffers.pop(leaf) for leaf in self.packed.layers[layer]}
            model.set_submodule(place, self._made(layer, place, module, holder, tensors))
        self._held.clear()
        self.remove_quantization_config(model)

    def _made(
        self, layer: str, place: str, module: nn.Module, holder: _Holder, tensors: Mapping[str, Any]
    ) -> nn.Module:
        """Convert a holder into the served layer."""
        weight = module.get_parameter(_STEM)
        plain = type(module) in (nn.Linear, Conv1D) and "forward" not in vars(module)
        if not weight.numel():  # in a model that is loaded without its layers
            module.register_parameter(_STEM, nn.Parameter(weight.new_empty(weight.shape, device="cpu")))
            return module
        outputs, inputs = weight.shape[::-1] if type(module) is Conv1D else weight.shape
        weights = self.packed.read(layer, (layer, place), tensors, (outputs, inputs))
        if plain:
            bias = holder.own_bias
            return weights.layer(None if bias is None else bias.to(weight.dtype), weight.dtype)
        for name, own in [*holder._parameters.items(), *holder._buffers.items()]:
            if name in module._parameters or name in module._buffers:
                setattr(module, name, own)
        module.register_parameter(_STEM, nn.Parameter(weights.dequantised(weight.dtype), requires_grad=False))
        return module

    def dequantised(self, name: str, pattern: str, number: int, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise one of the tensors that the library fuses into `name`. Raises `ConfigError`."""
        layer = self._fused[name, pattern][number]
        return self.packed.read(layer, (layer,), tensors, None).dequantised(dtype)


class _Dequantise(ConversionOps):
    """Packed tensors → dequantised ones, before the library rearranges them."""

    def __init__(self, reader: PackedReader, stems: Sequence[str]) -> None:
        """`stems`: prefixes of patterns, in order."""
        self.hf_quantizer = reader
        self._stems = stems

    def __deepcopy__(self, memo: Any) -> _Dequantise:
        return self

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        *,
        full_layer_name: str,
        model: PreTrainedModel,
        **others: Any,
    ) -> dict[str, list[torch.Tensor]]:
        try:
            return self._dequantised(input_dict, full_layer_name, model.get_parameter(full_layer_name).dtype)
        except ConfigError as error:
            self.hf_quantizer.packed.error = error
            raise

    def _dequantised(
        self, given: dict[str, list[torch.Tensor]], name: str, dtype: torch.dtype
    ) -> dict[str, list[torch.Tensor]]:
        made: dict[str, list[torch.Tensor]] = {}
        for stem in self._stems:
            parts = {key[len(stem) :]: given.pop(key) for key in list(given) if key.startswith(stem)}
            if set(parts) <= {_STEM}:
                made.update({stem + leaf: [tensor.to(dtype) for tensor in of] for leaf, of in parts.items()})
                continue
            if len({len(of) for of in parts.values()}) > 1:
                counts = ", ".join(f"{len(of)} {leaf}" for leaf, of in sorted(parts.items()))
                raise ConfigError(f"{self.hf_quantizer.packed.checkpoint.directory}: {name} is of {counts}")
            made[stem + _STEM] = [
                self.hf_quantizer.dequantised(name, stem + _STEM, number, dict(zip(parts, of, strict=True)), dtype)
                for number, of in enumerate(zip(*parts.values(), strict=True))
            ]
        return made

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("packed weights are not written")


def _place(name: str, conversions: Sequence[Any], prefix: str, state: Mapping[str, Any]) -> tuple[str, str | None]:
    """The model's name of a checkpoint tensor, and the pattern that rearranges it, if any."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    found, pattern = rename_source_key(name, renamings, converters, prefix, state)
    if found not in state and name in state:
        return rename_source_key(name, [], [], prefix, state)
    return found, pattern


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key with numbers in numeric order: the order in which the library reads experts."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


register_quantizer(NAME)(PackedReader)
