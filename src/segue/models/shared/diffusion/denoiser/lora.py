"""LoRA adapters of a denoiser. All rows of a call use the same one; rows with different adapters run in other calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from segue.engines.diffusion.contract import Row
from segue.graph.deployment.options import LoraPlan
from segue.kernels.linear.lora import Lora, LoraLinear, Pair, wrap_linears
from segue.messages.errors import ConfigError, nearest
from segue.models.shared.diffusion.denoiser.gguf_files import layer_kinds
from segue.models.shared.diffusion.library import convert_unet_state_dict_to_peft
from segue.models.shared.lora import (
    CONFIG,
    LINEARS,
    AdaptersByName,
    check_config,
    features,
    is_file,
    named_as_written,
    read_adapter,
    scaled_pair,
)

WEIGHTS = "pytorch_lora_weights.safetensors"
"""File name under which diffusers' pipelines save adapters."""
_METADATA = "lora_adapter_metadata"
"""Key of the file's header that holds PEFT's config, under `PART.KEY`."""
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, NotImplementedError)
"""Exceptions of diffusers' converters for unknown files: they parse names without checks."""
_TENSOR = re.compile(
    r"(?P<layer>.+?)\.(?:lora_(?P<which>[AB])\.weight|lora\.(?P<old>down|up)\.weight|(?P<alpha>alpha))"
)


Tensors = dict[str, torch.Tensor]
"""Tensors by the file's names."""


class DenoiserAdapters(AdaptersByName):
    """The LoRA adapters of one network."""

    def __init__(
        self, network: nn.Module, pipeline: Any, part: str, plan: LoraPlan, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Wraps every linear layer, and loads the adapters of `plan`. `pipeline`: the class that `model_index.json`
        names, which knows the layer names of other programs; `part`: the network's name in it. Raises `ConfigError`."""
        self._switch, found = wrap_linears(network, network, (*LINEARS, *layer_kinds()), features)
        layers = named_as_written(network, found)

        def read_path(path: Path) -> Mapping[str, Pair]:
            return read(path, part, layers, plan.max_rank, lambda tensors: renamed(tensors, pipeline, network))

        super().__init__(plan, layers, read_path, device, dtype)

    def during(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """A context within which the layers add the adapter of the rows, all of which have the same."""
        lora = rows[0].sample.adapter
        assert lora is None or isinstance(lora, Lora)
        return self._switch.during_whole(lora)


def read(
    path: Path, part: str, layers: Mapping[str, LoraLinear], max_rank: int, rename: Callable[[Tensors], Tensors]
) -> dict[str, Pair]:
    """A and scaled B, float32, by layer: from a directory that PEFT wrote, or a file (or the only one of a directory)
    by diffusers or another program whose names `rename` converts to diffusers'. Raises `ConfigError` with the file, key
    or tensor."""
    if is_file(path / CONFIG):
        return read_adapter(path, layers, max_rank)
    file = _file(path)
    found: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            config = _config(file, opened.metadata() or {}, part)
            tensors: Tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  (not a mapping)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}", field="lora_path") from error
    if any(_TENSOR.fullmatch(key) is None or not key.startswith(f"{part}.") for key in tensors):
        try:
            tensors = rename(tensors)
        except _UNREADABLE as error:
            raise ConfigError(
                f"{file}: tensors like {next(iter(tensors))!r} have other programs' names, and diffusers cannot make "
                f"its own of them: {error}",
                field="lora_path",
            ) from error
    for key, tensor in tensors.items():
        layer, which = _place(file, key, part, layers)
        found.setdefault(layer, {})[which] = tensor
    if not found:
        raise ConfigError(f"{file}: it has no tensors", field="lora_path")
    pairs = {}
    for layer, tensors in found.items():
        alpha = tensors.pop("alpha", None)
        own = config
        if own is None:  # without a config, B is scaled already
            rank = len(tensors["A"]) if "A" in tensors else 0
            own = {"r": rank, "lora_alpha": rank if alpha is None else float(alpha)}
        pairs[layer] = scaled_pair(file, layers[layer], tensors, own, max_rank)
    return pairs


def renamed(tensors: Tensors, pipeline: Any, network: Any) -> Tensors:
    """Convert tensor names to diffusers': from kohya-ss's scripts, Lightning, and any other program that the `pipeline`
    class reads. A network's `alpha` is a separate tensor, or already multiplied into the others."""
    given = pipeline.lora_state_dict(dict(tensors), unet_config=network.config)
    made, alphas = given if isinstance(given, tuple) else (given, None)
    if any(".lora.down." in key or "_lora.down." in key for key in made):
        made, alphas = convert_unet_state_dict_to_peft(made), convert_unet_state_dict_to_peft(alphas or {})
    scales = {
        f"{key.removesuffix('.alpha').removesuffix('.lora_A.weight')}.alpha": torch.tensor(float(alpha))
        for key, alpha in (alphas or {}).items()
    }
    return {**made, **scales}


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / WEIGHTS).is_file():
        return path / WEIGHTS
    others = sorted(path.glob("*.safetensors"))
    if len(others) != 1:
        raise ConfigError(
            f"{path}: has no {CONFIG} (PEFT) and no {WEIGHTS} (diffusers), so it is not a LoRA adapter",
            field="lora_path",
        )
    return others[0]


def _config(file: Path, header: Mapping[str, str], part: str) -> dict[str, Any] | None:
    """The header's config of the network's adapter, None if it has none."""
    if _METADATA not in header:
        return None
    try:
        written = json.loads(header[_METADATA])
    except ValueError as error:
        raise ConfigError(f"{file}: {_METADATA} of its header is not JSON: {error}", field="lora_path") from error
    config = {key.removeprefix(f"{part}."): value for key, value in written.items() if key.startswith(f"{part}.")}
    if not config:
        return None
    config.setdefault("peft_type", "LORA")
    check_config(file, config)
    return config


def _place(file: Path, key: str, part: str, layers: Mapping[str, LoraLinear]) -> tuple[str, str]:
    """(layer, `A`, `B` or `alpha`) of a tensor."""
    match = _TENSOR.fullmatch(key)
    if match is None or not key.startswith(f"{part}."):
        raise ConfigError(
            f"{file}: tensor {key!r} is not a lora_A or lora_B of a layer of the {part}; neither adapters of text "
            "encoders nor names that diffusers does not know are served",
            field="lora_path",
        )
    layer = match["layer"].removeprefix(f"{part}.")
    if layer not in layers:
        raise ConfigError(
            f"{file}: tensor {key!r} is for {layer!r}, which is not a linear layer of this model's {part}"
            f"{nearest(layer, layers)}",
            field="lora_path",
        )
    return layer, match["which"] or match["alpha"] or {"down": "A", "up": "B"}[match["old"]]
