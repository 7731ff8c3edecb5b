"""Load a denoiser's weights from a GGUF file: stored quantised, dequantised at each call by diffusers' own layers.

The file holds one network, with the tensor names of its authors' program (as published for FLUX, Wan, Stable Diffusion
3, Z-Image, …, which diffusers renames) or diffusers' own. Everything else comes from the checkpoint: that network's
config, and all other parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from segue.engines.diffusion.contract import DenoiserContext
from segue.messages.errors import ConfigError, nearest
from segue.models.shared.checkpoint.pretrained import without_bars
from segue.models.shared.diffusion.library import (
    VERSION,
    FromOriginalModelMixin,
    GGUFQuantizationConfig,
)
from segue.models.shared.diffusion.loading import UNREADABLE, component_class, pipeline_index

INSTALL = "pip install 'gguf>=0.10'"


def check_gguf(ctx: DenoiserContext, component: str) -> None:
    """Raises `ConfigError` for keys that cannot be combined with a GGUF file, and for files of unknown networks.
    `component`: one of the stage's networks."""
    if not ctx.gguf:
        return
    field, first = f"stages.{ctx.stage}.gguf", component.removesuffix("_2")
    networks = [name for name in pipeline_index(ctx.model_dir) if name in (first, f"{first}_2")]
    for name in ctx.gguf:
        if name not in networks:
            raise ConfigError(
                f"{field} has a file for {name!r}, which is not a network of this stage{nearest(name, networks)}",
                field=f"{field}.{name}",
            )
    wrong: Mapping[str, tuple[bool, str]] = {
        "quantization": (ctx.quantization != "none", "its weights are quantised already"),
        "tensor_parallel": (ctx.tensor_parallel > 1, "its weights are packed in blocks that cannot be cut"),
        "load_format": (ctx.load_format == "dummy", "there would be random weights in place of its own"),
    }
    for key, (given, why) in wrong.items():
        if given:
            raise ConfigError(
                f"stage {ctx.stage!r}: {key} does not go with gguf: {why}; leave one out",
                field=f"stages.{ctx.stage}.{key}",
            )
    if find_spec("gguf") is None:
        raise ConfigError(f"{field} is set, which needs the package gguf: {INSTALL}", field=field)


def read_gguf(ctx: DenoiserContext, component: str, file: Path) -> Any:
    """A network on `ctx.device` with the weights of a file; it computes in `ctx.dtype`.

    Raises `ConfigError` with the file's name if it is missing or not GGUF, has a number type that diffusers does not
    know, lacks tensors, or has quantised tensors that must not be quantised.
    """
    field = f"stages.{ctx.stage}.gguf"
    kind = component_class(ctx.model_dir, component)
    if not issubclass(kind, FromOriginalModelMixin):
        raise ConfigError(
            f"{field}: diffusers {VERSION} cannot load {component} ({kind.__name__}) from a single file", field=field
        )
    if not file.is_file():
        raise ConfigError(f"{field}: there is no file {file}", field=field)
    try:
        with without_bars():
            network: nn.Module = kind.from_single_file(
                str(file),
                config=str(ctx.model_dir),
                subfolder=component,
                local_files_only=True,
                quantization_config=GGUFQuantizationConfig(compute_dtype=ctx.dtype),
                dtype=ctx.dtype,
            )
    except (*UNREADABLE, AttributeError, IndexError) as error:
        raise ConfigError(f"{file}: cannot be read as the weights of {component}: {error}", field=field) from error
    _check_read(network, file, field)
    ctx.progress(1.0, component)
    return network.to(ctx.device).eval().requires_grad_(False)


def _check_read(network: nn.Module, file: Path, field: str) -> None:
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter  # imports gguf

    readable = {name for name, module in network.named_modules() if isinstance(module, GGUFLinear)}
    for name, parameter in network.named_parameters():
        if parameter.device.type == "meta":
            raise ConfigError(f"{file}: it has no tensor {name!r}", field=field)
        holder, _, leaf = name.rpartition(".")
        if isinstance(parameter, GGUFParameter) and not (holder in readable and leaf == "weight"):
            raise ConfigError(
                f"{file}: {name!r} is of type {parameter.quant_type.name}; except weights of linear layers, tensors "
                "must be F32 or F16",
                field=field,
            )


def layer_kinds() -> tuple[type[nn.Module], ...]:
    """The linear layer classes of such a network; empty without the package."""
    if find_spec("gguf") is None:
        return ()
    from diffusers.quantizers.gguf.utils import GGUFLinear

    return (GGUFLinear,)
