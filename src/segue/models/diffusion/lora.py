"""LoRA adapters of a denoiser: one for all rows of a call, so that rows with another one are in calls of their own."""

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
from segue.graph.lora import LoraPlan
from segue.kernels.lora import Lora, LoraLinear, Pair, wrap_linears
from segue.messages.errors import ConfigError, nearest
from segue.models.diffusion.gguf_files import layer_kinds
from segue.models.diffusion.library import convert_unet_state_dict_to_peft
from segue.models.lora import LINEARS, AdaptersByName, features, named_as_written
from segue.models.peft import CONFIG, check_config, is_file, read_adapter, scaled_pair

WEIGHTS = "pytorch_lora_weights.safetensors"
"""What diffusers' pipelines save."""
_METADATA = "lora_adapter_metadata"
"""Key of the file's header: the config PEFT had, under `PART.KEY`."""
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, NotImplementedError)
"""What diffusers' converters raise for a file that they do not know: they take names apart without a check."""
_TENSOR = re.compile(
    r"(?P<layer>.+?)\.(?:lora_(?P<which>[AB])\.weight|lora\.(?P<old>down|up)\.weight|(?P<alpha>alpha))"
)


Tensors = dict[str, torch.Tensor]
"""By the names of a file."""


class DenoiserAdapters(AdaptersByName):
    """The adapters of one network."""

    def __init__(
        self, network: nn.Module, pipeline: Any, part: str, plan: LoraPlan, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Puts a layer over every linear one, and loads what `plan` names. `pipeline`: the class that
        `model_index.json` names, which knows other programs' names of layers; `part`: the network's name in it.
        Raises `ConfigError`."""
        self._switch, found = wrap_linears(network, network, (*LINEARS, *layer_kinds()), features)
        layers = named_as_written(network, found)

        def read_path(path: Path) -> Mapping[str, Pair]:
            return read(path, part, layers, plan.max_rank, lambda tensors: renamed(tensors, pipeline, network))

        super().__init__(plan, layers, read_path, device, dtype)

    def during(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        """Within it, the layers add what the rows have, all of them the same."""
        lora = rows[0].sample.adapter
        assert lora is None or isinstance(lora, Lora)
        return self._switch.during_whole(lora)


def read(
    path: Path, part: str, layers: Mapping[str, LoraLinear], max_rank: int, rename: Callable[[Tensors], Tensors]
) -> dict[str, Pair]:
    """A and scaled B, float32, by layer: of a directory that PEFT wrote, or of a file (or the one in a directory) that
    diffusers wrote, or another program whose names `rename` makes diffusers'. Raises `ConfigError` naming file, key or
    tensor."""
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
        raise ConfigError(f"{file}: there is no tensor in it", field="lora_path")
    pairs = {}
    for layer, tensors in found.items():
        alpha = tensors.pop("alpha", None)
        own = config
        if own is None:  # where nothing is said, B is scaled already
            rank = len(tensors["A"]) if "A" in tensors else 0
            own = {"r": rank, "lora_alpha": rank if alpha is None else float(alpha)}
        pairs[layer] = scaled_pair(file, layers[layer], tensors, own, max_rank)
    return pairs


def renamed(tensors: Tensors, pipeline: Any, network: Any) -> Tensors:
    """Tensors under diffusers' names: of files with those of kohya-ss's scripts, of Lightning's, and whatever else the
    `pipeline` class reads. A network's `alpha` is a tensor of its own, or in the others already."""
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
            f"{path}: has no {CONFIG} (as PEFT writes) and no {WEIGHTS} (as diffusers does), so it is no LoRA adapter",
            field="lora_path",
        )
    return others[0]


def _config(file: Path, header: Mapping[str, str], part: str) -> dict[str, Any] | None:
    """What the header says of the network's adapter; None where it says nothing."""
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
            f"{file}: tensor {key!r} is no lora_A or lora_B of a layer of the {part}; adapters of text encoders are "
            "not served, nor what diffusers does not know by name",
            field="lora_path",
        )
    layer = match["layer"].removeprefix(f"{part}.")
    if layer not in layers:
        raise ConfigError(
            f"{file}: tensor {key!r} is for {layer!r}, which is no linear layer of this model's {part}"
            f"{nearest(layer, layers)}",
            field="lora_path",
        )
    return layer, match["which"] or match["alpha"] or {"down": "A", "up": "B"}[match["old"]]
