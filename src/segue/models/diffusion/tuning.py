"""How a denoiser's network is made to run: as the keys of its stage say.

| key | lossless | |
|---|---|---|
| `quantization` | no | linear layers inside the blocks (`segue.kernels.quantized`) |
| `attention` | to rounding; `sage`: no | diffusers' attention dispatch |
| `compile` | to rounding | the blocks, one by one |
| `offload` | yes | weights wait in the host's memory (diffusers' group offloading), and come block by block |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from segue.engines.contract import LoadContext
from segue.kernels.compiled import compile_forwards
from segue.kernels.quantized import quantize_linears
from segue.messages.errors import ConfigError
from segue.models.diffusion.library import BLOCK_LISTS
from segue.models.diffusion.loading import load_component

PLAIN_ATTENTION = ("auto", "native")
"""These take masks."""
_BACKENDS = {"cudnn": "_native_cudnn", "flash_3": "_flash_3"}
"""What the library calls them, where that is another name."""
_CPU = torch.device("cpu")


def load_network(ctx: LoadContext, component: str) -> Any:
    """A part of the checkpoint, on its device, as the deployment wants it. Raises `ConfigError` naming the key."""
    _check_lora(ctx)
    if ctx.offload != "none":
        _check_offload(ctx)
    network = load_component(ctx if ctx.offload == "none" else replace(ctx, device=_CPU), component)
    if ctx.attention != "auto":
        _set_attention(network, ctx)
    if ctx.quantization != "none":
        _quantize(network, ctx)
    if ctx.offload != "none":
        offload(network, ctx.device, use_stream=True)
    if ctx.compile:
        compile_forwards(_named_blocks(network, ctx, "compile"), ctx.device.type)
    return network


def offload(network: Any, device: torch.device, *, use_stream: bool) -> None:
    """Weights of `network` come to `device` block by block; `use_stream`: the next while one is computed."""
    network.enable_group_offload(
        onload_device=device,
        offload_device=_CPU,
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=use_stream,
    )


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks that are most of a network, in order; of a UNet, those of its attention."""
    lists = [child for name, child in network.named_modules() if name.split(".")[-1] in BLOCK_LISTS and _is_list(child)]
    return [block for blocks in lists for block in blocks.children()]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and any(any(child.children()) for child in module)


def _named_blocks(network: nn.Module, ctx: LoadContext, key: str) -> list[nn.Module]:
    blocks = blocks_of(network)
    if not blocks:
        raise ConfigError(
            f"stage {ctx.stage!r}: {key} is set, but {type(network).__name__} has no list of blocks",
            field=f"stages.{ctx.stage}.{key}",
        )
    return blocks


def _quantize(network: nn.Module, ctx: LoadContext) -> None:
    """What is before and behind the blocks stays whole: it is little, and errors in it are seen."""
    blocks = _named_blocks(network, ctx, "quantization")
    if not sum(quantize_linears(block, ctx.quantization, _plain_linear) for block in blocks):
        raise ConfigError(
            f"stage {ctx.stage!r}: quantization is {ctx.quantization!r}, but {type(network).__name__} has no linear "
            "layer that can be made into that",
            field=f"stages.{ctx.stage}.quantization",
        )


def _plain_linear(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    return (module.weight, module.bias) if type(module) is nn.Linear else None


def _set_attention(network: Any, ctx: LoadContext) -> None:
    field = f"stages.{ctx.stage}.attention"
    if ctx.device.type == "cpu" and ctx.attention not in PLAIN_ATTENTION:
        raise ConfigError(
            f"stage {ctx.stage!r}: attention is {ctx.attention!r}, which needs a GPU; on a CPU it must be auto or "
            "native",
            field=field,
        )
    try:
        network.set_attention_backend(_BACKENDS.get(ctx.attention, ctx.attention))
    except (RuntimeError, ValueError, ImportError) as error:
        raise ConfigError(f"stage {ctx.stage!r}: attention is {ctx.attention!r}: {error}", field=field) from error


def _check_lora(ctx: LoadContext) -> None:
    """Adapters are added to plain linear layers that run as they are."""
    for key, given in (("quantization", ctx.quantization), ("offload", ctx.offload), ("compile", ctx.compile)):
        if ctx.lora is not None and given not in ("none", False):
            raise ConfigError(
                f"stage {ctx.stage!r}: {key} does not go with lora; leave one out", field=f"stages.{ctx.stage}.{key}"
            )


def _check_offload(ctx: LoadContext) -> None:
    field = f"stages.{ctx.stage}.offload"
    if ctx.device.type == "cpu":
        raise ConfigError(
            f"stage {ctx.stage!r}: offload is {ctx.offload!r}, but the stage runs on the CPU, where its weights are "
            "already; it must be none",
            field=field,
        )
    if ctx.compile:
        raise ConfigError(f"stage {ctx.stage!r}: offload does not go with compile; leave one out", field=field)
