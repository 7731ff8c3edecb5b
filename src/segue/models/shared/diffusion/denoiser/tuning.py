"""Load a denoiser's network and optimise it as the keys of its stage say.

| key | lossless | |
|---|---|---|
| `quantization` | no | linear layers inside the blocks (`segue.kernels.prepare`) |
| `gguf` | the file is | weights of a GGUF file (`segue.models.shared.diffusion.denoiser.gguf_files`) |
| `attention` | to rounding; `sage`: no | diffusers' attention dispatch |
| `compile` | to rounding | the blocks, one by one, except code in which ranks communicate |
| `offload` | yes | weights stay in host memory (diffusers' group offloading) and are loaded block by block |
| `tensor_parallel` | to rounding | each rank has a part of the weights (`tensor_parallel.py`) |
| `sequence_parallel` | to rounding | each rank has a part of the tokens (`sequence_parallel.py`) |
| `enforce_eager` | to rounding | no joined layers, no captured graphs, the library's own blocks |

If none of these is set, and there are no LoRA adapters, layers with the same input (q, k and v; gate and up) are joined
into one matmul: the network's first call shows which they are. On a CPU in float32 all linear layers are packed for
their matmuls, and a GELU after a matmul is fused into it. These changes affect results by rounding alone. Small calls
are captured and replayed, on a GPU as CUDA graphs (`segue.kernels.graphs.replay`), except with LoRA adapters, offload
or several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.engines.diffusion.contract import DenoiserContext
from segue.kernels.graphs.compiled import compile_forwards
from segue.kernels.prepare import Gelu, Plan, prepare
from segue.messages.errors import ConfigError
from segue.models.shared.diffusion.denoiser.block_cache import hook_blocks
from segue.models.shared.diffusion.denoiser.gguf_files import check_gguf, read_gguf
from segue.models.shared.diffusion.denoiser.sequence_parallel import check_sequence, divide_sequence, set_attention
from segue.models.shared.diffusion.denoiser.tensor_parallel import divide_weights
from segue.models.shared.diffusion.library import (
    BLOCK_LISTS,
    GELU,
    Attention,
    AttentionModuleMixin,
    FluxSingleTransformerBlock,
    ModelMixin,
)
from segue.models.shared.diffusion.loading import load_component
from segue.parallel.layers import RowParallel, SummedRMSNorm

PACKED_ROWS = 256
"""Typical number of tokens of a call on a CPU: the weights are laid out for it."""


PLAIN_ATTENTION = ("auto", "native")
"""These accept masks."""
_BACKENDS = {"cudnn": "_native_cudnn", "flash_3": "_flash_3"}
"""The library's names, where they differ."""
_CPU = torch.device("cpu")


def load_network(
    ctx: DenoiserContext,
    component: str,
    keep: Collection[str] = (),
    load: Callable[[DenoiserContext, str], nn.Module] = load_component,
) -> Any:
    """Load a part of the checkpoint onto its device and apply the deployment's settings. `keep`: linear layers whose
    weights the network reads directly; `load`: reads the part. Raises `ConfigError` with the key."""
    _check_lora(ctx)
    if ctx.sequence_parallel > 1:
        check_sequence(ctx)
    check_gguf(ctx, component)
    if ctx.offload != "none":
        _check_offload(ctx)
    waits = ctx.offload != "none" or ctx.tensor_parallel > 1
    network = _loaded(replace(ctx, device=_CPU) if waits else ctx, component, load)
    if ctx.tensor_parallel > 1:
        divide_weights(network, ctx)
        if ctx.offload == "none":
            network.to(ctx.device)  # with offload, the device may be too small for all blocks
    if ctx.attention != "auto":
        _set_attention(network, ctx)
    if ctx.compile:
        blocks = _named_blocks(network, ctx, "compile")
        compile_forwards(blocks, ctx.device.type, [module for module in network.modules() if _exchanges(module, ctx)])
    if ctx.sequence_parallel > 1:
        hook_blocks(network)  # innermost, within the hooks that divide and join their tensors
        divide_sequence(network, ctx)
    if ctx.quantization != "none":
        _quantize(network, ctx)
    if ctx.offload != "none":
        _check_library(network, ctx, "offload")
        offload(network, ctx.device)
    prepare(network, ctx.device, _plan(network, ctx, keep))
    return network


def _plan(network: nn.Module, ctx: DenoiserContext, keep: Collection[str]) -> Plan:
    """What is left to do with a loaded network."""
    plain = not (ctx.compile or ctx.gguf) and ctx.lora is None and ctx.quantization == "none"
    waits = ctx.offload != "none"
    # modules with processors, or processors as modules
    attention = [module for module in network.modules() if isinstance(module, Attention | AttentionModuleMixin)]
    return Plan(
        attention=attention if ctx.attention == "auto" and ctx.sequence_parallel == 1 else (),
        rows=0 if waits else PACKED_ROWS,
        keep=keep,
        gelus=() if ctx.lora is not None else gelus(network),  # layers are wrapped for adapters
        first_call=ctx.fused and plain and not waits,
        replayed=ctx.recorded and ctx.lora is None and not waits and ctx.ways is None,
        dtype=ctx.dtype,
        compiled=ctx.compile,
    )


def gelus(network: nn.Module) -> list[Gelu]:
    """The GELUs after linear layers in blocks of the library."""
    found = []
    for name, module in network.named_modules():
        if type(module) is GELU:
            found.append(Gelu(f"{name}.proj", module.approximate, name))
        elif type(module) is FluxSingleTransformerBlock:
            mlp = f"{name}.proj_mlp"
            found.append(Gelu(mlp, module.act_mlp.approximate, mlp, f"{name}.act_mlp"))
    return found


def _loaded(ctx: DenoiserContext, component: str, load: Callable[[DenoiserContext, str], nn.Module]) -> Any:
    file = ctx.gguf.get(component)
    return load(ctx, component) if file is None else read_gguf(ctx, component, Path(file))


def offload(network: Any, device: torch.device) -> None:
    """Keep the weights of `network` on the host and load them to `device` block by block, on a GPU one block ahead."""
    network.enable_group_offload(
        onload_device=device,
        offload_device=_CPU,
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=device.type == "cuda",
    )


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks that make up most of a network, in order; for a UNet, those of its attention."""
    lists = [child for name, child in network.named_modules() if name.split(".")[-1] in BLOCK_LISTS and _is_list(child)]
    return [block for blocks in lists for block in blocks.children()]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and any(any(child.children()) for child in module)


def _named_blocks(network: nn.Module, ctx: DenoiserContext, key: str) -> list[nn.Module]:
    blocks = blocks_of(network)
    if not blocks:
        raise ConfigError(
            f"stage {ctx.stage!r}: {key} is set, but {type(network).__name__} has no list of blocks",
            field=f"stages.{ctx.stage}.{key}",
        )
    return blocks


def _quantize(network: nn.Module, ctx: DenoiserContext) -> None:
    """Quantise the blocks. Layers before and after them stay unquantised: they are small, and errors there are
    visible."""
    blocks = _named_blocks(network, ctx, "quantization")
    if not sum(prepare(block, ctx.device, Plan(quantization=ctx.quantization)) for block in blocks):
        raise ConfigError(
            f"stage {ctx.stage!r}: quantization is {ctx.quantization!r}, but {type(network).__name__} has no linear "
            "layer that can be quantised this way",
            field=f"stages.{ctx.stage}.quantization",
        )


def _exchanges(module: nn.Module, ctx: DenoiserContext) -> bool:
    """Whether ranks wait for each other in this module. It must not be traced: the library's attention asks other ranks
    for their lengths during tracing, and ranks need not trace equally often, or at the same call."""
    if isinstance(module, RowParallel | SummedRMSNorm):
        return True
    return ctx.sequence_parallel > 1 and isinstance(module, Attention | AttentionModuleMixin)


def _set_attention(network: Any, ctx: DenoiserContext) -> None:
    field = f"stages.{ctx.stage}.attention"
    _check_library(network, ctx, "attention")
    if ctx.device.type == "cpu" and ctx.attention not in PLAIN_ATTENTION:
        raise ConfigError(
            f"stage {ctx.stage!r}: attention is {ctx.attention!r}, which needs a GPU; on a CPU it must be auto or "
            "native",
            field=field,
        )
    try:
        set_attention(network, _BACKENDS.get(ctx.attention, ctx.attention))
    except (RuntimeError, ValueError, ImportError) as error:
        raise ConfigError(f"stage {ctx.stage!r}: attention is {ctx.attention!r}: {error}", field=field) from error


def _check_library(network: object, ctx: DenoiserContext, key: str) -> None:
    if not isinstance(network, ModelMixin):
        raise ConfigError(
            f"stage {ctx.stage!r}: {key} is set, but {type(network).__name__} is not a diffusers model",
            field=f"stages.{ctx.stage}.{key}",
        )


def _check_lora(ctx: DenoiserContext) -> None:
    """LoRA adapters can be added only to plain linear layers that run unmodified."""
    for key, given in (("quantization", ctx.quantization), ("offload", ctx.offload), ("compile", ctx.compile)):
        if ctx.lora is not None and given not in ("none", False):
            raise ConfigError(
                f"stage {ctx.stage!r}: {key} does not go with lora; leave one out", field=f"stages.{ctx.stage}.{key}"
            )


def _check_offload(ctx: DenoiserContext) -> None:
    if ctx.compile:
        raise ConfigError(
            f"stage {ctx.stage!r}: offload does not go with compile; leave one out",
            field=f"stages.{ctx.stage}.offload",
        )
