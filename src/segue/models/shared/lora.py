"""LoRA adapters of a decoder: read from PEFT's files (`adapter_config.json` and `adapter_model.safetensors` in a
directory), kept by name, selected per sequence in each step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from segue.engines.autoregressive.contract import FlatBatch, Prompt
from segue.graph.deployment.options import LoraPlan
from segue.kernels.linear.layers import PreparedLinear
from segue.kernels.linear.lora import Lora, LoraLinear, Pair, lora_step, wrap_linears
from segue.messages.errors import ConfigError, NotFound, nearest
from segue.models.shared.library import Conv1D, PreTrainedModel, WeightRenaming, conversions_of, rename_source_key
from segue.parallel.layers import Divided

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<which>[AB])\.weight")
_READ = frozenset(("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"))
_HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
    )
)
"""Keys that are ignored: the tensors show which layers have an adapter; the rest concerns training or storage."""
_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # other values change the weights under the adapter
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "eva_config": ({},),
}
"""Keys → values, besides null, false and empty ones, that need no support."""


def read_adapter(
    directory: Path, layers: Mapping[str, LoraLinear], max_rank: int, present: Callable[[str], str] = str
) -> dict[str, Pair]:
    """A and scaled B, float32, by layer name. `present`: a layer's name in a file → its name in `layers`. Raises
    `ConfigError` with the file, key or tensor."""
    config = _read_config(directory / CONFIG)
    found: dict[str, dict[str, torch.Tensor]] = {}
    path = directory / WEIGHTS
    if not is_file(path):
        raise ConfigError(f"{path}: not there; adapters are read from safetensors files", field="lora_path")
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (not a mapping)
                layer, which = _place(path, key, layers, present)
                found.setdefault(layer, {})[which] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="lora_path") from error
    if not found:
        raise ConfigError(f"{path}: it has no tensors", field="lora_path")
    return {layer: scaled_pair(path, layers[layer], tensors, config, max_rank) for layer, tensors in found.items()}


def is_file(path: Path) -> bool:
    """Whether a file exists. Raises `ConfigError` if that cannot be determined: the name is too long, access is
    denied."""
    try:
        return path.is_file()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", field="lora_path") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not is_file(path):
        raise ConfigError(f"{path}: not there, so {str(path.parent)!r} is no LoRA adapter", field="lora_path")
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field="lora_path") from error
    check_config(path, config)
    return config


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Raise `ConfigError` for an unsupported config."""
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{path}: peft_type is {config.get('peft_type')!r}; only LORA can be served", field="lora_path"
        )
    for key, value in config.items():
        fine = key in _READ or key in _HARMLESS or not value or value in _NOTHING.get(key, ())
        if not fine:
            raise ConfigError(f"{path}: {key} is {value!r}, which cannot be served", field="lora_path")
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ConfigError(f"{path}: {key} is {value!r}; it must be a number above 0", field="lora_path")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise ConfigError(f"{path}: {key} is {config[key]!r}; it must be a mapping", field="lora_path")


def _place(path: Path, key: str, layers: Mapping[str, LoraLinear], present: Callable[[str], str]) -> tuple[str, str]:
    """(layer, `A` or `B`) of a tensor."""
    match = _TENSOR.fullmatch(key)
    if match is None:
        raise ConfigError(
            f"{path}: tensor {key!r} is not a lora_A or lora_B of a linear layer; nothing else can be served",
            field="lora_path",
        )
    layer = match["layer"].removeprefix(_PREFIX)
    found = present(layer)
    if found not in layers:
        raise ConfigError(
            f"{path}: tensor {key!r} is for {layer!r}, which is not a linear layer of this model's decoder"
            f"{nearest(layer, layers)}",
            field="lora_path",
        )
    return found, match["which"]


def scaled_pair(
    path: Path, layer: LoraLinear, tensors: dict[str, torch.Tensor], config: dict[str, Any], max_rank: int
) -> Pair:
    """A and scaled B, float32, of a layer; `tensors`: `A` and `B` as stored. Raises `ConfigError`."""
    if len(tensors) != 2:
        raise ConfigError(f"{path}: {layer.name} has lora_{min(tensors)} but not its counterpart", field="lora_path")
    rank = _of_pattern(config.get("rank_pattern"), layer.name, config["r"])
    alpha = _of_pattern(config.get("alpha_pattern"), layer.name, config["lora_alpha"])
    down, up = tensors["A"].float(), tensors["B"].float()
    in_features, out_features = layer.whole
    right = ((rank, in_features), (out_features, rank))
    if (tuple(down.shape), tuple(up.shape)) != right:
        raise ConfigError(
            f"{path}: lora_A and lora_B of {layer.name} are {list(down.shape)} and {list(up.shape)}; its config and "
            f"this model ask for {list(right[0])} and {list(right[1])}",
            field="lora_path",
        )
    if rank > max_rank:
        raise ConfigError(
            f"{path}: {layer.name} has rank {rank}, more than lora.max_rank of this stage ({max_rank})",
            field="lora_path",
        )
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise ConfigError(f"{path}: {layer.name} has weights that are not finite", field="lora_path")
    # Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Pair(down, up * scale)


def _of_pattern(pattern: dict[str, Any] | None, layer: str, default: Any) -> Any:
    """A layer's value: PEFT's keys are regular expressions for the end of its name."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", layer):
            return value
    return default


LINEARS = (nn.Linear, PreparedLinear, Conv1D)


class AdaptersByName:
    """The LoRA adapters of one network. Implements `segue.engines.autoregressive.contract.LoraHost`."""

    def __init__(
        self,
        plan: LoraPlan,
        layers: Mapping[str, LoraLinear],
        read: Callable[[Path], Mapping[str, Pair]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Loads the adapters of `plan`. `layers`: the network's, by name; `read`: reads an adapter's files into A and
        scaled B by layer name. Raises `ConfigError`."""
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
        """Memory of the maximum number of adapters, at the highest rank and in every layer."""
        widths = sum(layer.in_features + layer.out_features for layer in self._layers.values())
        return self._plan.max_adapters * self._plan.max_rank * widths * dtype.itemsize

    def load(self, name: str, directory: str) -> None:
        """Load an adapter under a name. Raises `ConfigError` if it is invalid, or the name is taken."""
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
        # a new serial even for a reused name: the files may have changed
        self._by_name[name] = Lora(name, b"lora %d" % next(self._serials), here)

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter; running requests continue. Unknown names are ignored."""
        self._by_name.pop(name, None)

    @property
    def loaded(self) -> Mapping[str, Lora]:
        """The adapters that requests can name."""
        return self._by_name

    def named(self, name: str) -> Lora:
        """The adapter of a name. Raises `NotFound` with the nearest name."""
        if name not in self._by_name:
            raise NotFound(f"there is no LoRA adapter {name!r}{nearest(name, self._by_name)}", field="adapter")
        return self._by_name[name]


class LoraAdapters(AdaptersByName):
    """The LoRA adapters of one decoder."""

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, plan: LoraPlan) -> None:
        """Wraps every linear layer of `decoder`, and loads the adapters of `plan`. Raises `ConfigError`."""
        self._switch, found = wrap_linears(model, decoder, LINEARS, features)
        layers = named_as_written(model, found)
        present = _present_names(model, layers)
        super().__init__(
            plan,
            layers,
            lambda directory: read_adapter(directory, layers, plan.max_rank, present),
            next(model.parameters()).device,
            model.get_input_embeddings().weight.dtype,
        )

    def during(self, batch: FlatBatch) -> AbstractContextManager[None]:
        """A context within which the layers apply the adapter of each sequence of a batch."""
        spans: list[tuple[Lora | None, int, int]] = []
        end = 0
        for prompt, start, stop in batch.prompts:
            begin, end = end, end + stop - start
            lora = None if prompt is None else prompt.adapter
            assert lora is None or isinstance(lora, Lora)
            spans.append((lora, begin, end))
        return self._switch.during(lora_step(spans, self._device))


def named_as_written(model: nn.Module, layers: Mapping[str, LoraLinear]) -> dict[str, LoraLinear]:
    """The layers by their names in files, without the wrappers that divide them among ranks."""
    named = {}
    for place, layer in layers.items():
        holder, _, _ = place.rpartition(".")
        divided = model.get_submodule(holder)
        if isinstance(divided, Divided):
            layer.name, layer.share = holder, divided.share
        named[layer.name] = layer
    return named


def _present_names(model: PreTrainedModel, layers: Collection[str]) -> Callable[[str], str]:
    """A function from a layer's name in an adapter to its name in `model`. Adapters of older versions of the library,
    and of the whole model that `model` is a part of, have the names that the library also renames in checkpoints."""
    renamings = [change for change in conversions_of(model) if isinstance(change, WeightRenaming)]
    known = {f"{layer}.weight": True for layer in layers}

    def present(layer: str) -> str:
        if layer in layers:
            return layer
        found, _ = rename_source_key(f"{layer}.weight", renamings, [], model.base_model_prefix, known)
        return found.removesuffix(".weight")

    return present


def named_adapter(adapters: AdaptersByName | None, name: str | None) -> Lora | None:
    """The LoRA adapter that a request names, if any. Raises `NotFound`."""
    if name is None:
        return None
    if adapters is None:
        raise NotFound(f"there is no LoRA adapter {name!r}: this stage has none", field="adapter")
    return adapters.named(name)


def with_adapter(prompt: Prompt, lora: Lora) -> Prompt:
    """A copy of the prompt with cache keys of its own: other requests cannot share KV that an adapter computed."""
    identity: list[int | bytes] = list(prompt.token_ids if prompt.identity is None else prompt.identity)
    if identity:  # a block's hash includes the previous blocks, so changing the first token suffices
        first = identity[0]
        identity[0] = lora.identity + (b" i%d" % first if isinstance(first, int) else b" b" + first)
    return replace(prompt, adapter=lora, identity=identity)


def features(layer: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of one of `LINEARS`; GPT-2's weight is transposed."""
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    return int(layer.in_features), int(layer.out_features)  # type: ignore[arg-type]
