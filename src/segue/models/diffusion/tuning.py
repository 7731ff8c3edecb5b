"""How a denoiser's network is made to run: as the keys of its stage say.

| key | lossless | |
|---|---|---|
| `quantization` | no | linear layers inside the blocks (`segue.kernels.quantized`) |
| `gguf` | the file is | weights of a GGUF file (`segue.models.diffusion.gguf_files`) |
| `attention` | to rounding; `sage`: no | diffusers' attention dispatch |
| `compile` | to rounding | the blocks, one by one, but for what ranks exchange in them |
| `offload` | yes | weights wait in the host's memory (diffusers' group offloading), and come block by block |
| `tensor_parallel` | to rounding | each rank has a part of the weights (`segue.models.diffusion.weight_ranks`) |
| `sequence_parallel` | to rounding | each rank has a part of the tokens (`segue.models.diffusion.sequence`) |
| `enforce_eager` | to rounding | no products made of several layers, no recorded calls, the library's own blocks |

Where none of these is said, and there are no adapters, layers with the same input become one product; on a CPU all
linear layers are packed (`segue.models.diffusion.laid_out`). Small calls are recorded, on a GPU as CUDA graphs
(`segue.kernels.network_graphs`), but with adapters, offload or several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segue.engines.contract import LoadContext
from segue.kernels.compiled import compile_forwards
from segue.kernels.full_attention import compile_attention
from segue.kernels.native import library
from segue.kernels.network_graphs import CpuRecorder, CudaRecorder, NetworkGraphs
from segue.kernels.quantized import quantize_linears
from segue.messages.errors import ConfigError
from segue.models.diffusion.attention import set_attention
from segue.models.diffusion.block_cache import hook_blocks
from segue.models.diffusion.gguf_files import check_gguf, read_gguf
from segue.models.diffusion.laid_out import fuse_after_first_call, pack
from segue.models.diffusion.library import BLOCK_LISTS, Attention, AttentionModuleMixin, ModelMixin
from segue.models.diffusion.loading import load_component
from segue.models.diffusion.sequence import check_sequence, divide_sequence
from segue.models.diffusion.weight_ranks import divide_weights
from segue.parallel.layers import RowParallel, SummedRMSNorm

PLAIN_ATTENTION = ("auto", "native")
"""These take masks."""
_BACKENDS = {"cudnn": "_native_cudnn", "flash_3": "_flash_3"}
"""What the library calls them, where that is another name."""
_CPU = torch.device("cpu")


def load_network(
    ctx: LoadContext,
    component: str,
    keep: Collection[str] = (),
    load: Callable[[LoadContext, str], nn.Module] = load_component,
) -> Any:
    """A part of the checkpoint, on its device, as the deployment wants it. `keep`: linear layers whose weights the
    network looks at by itself; `load`: what reads it. Raises `ConfigError` naming the key."""
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
            network.to(ctx.device)  # where there may be no room for all of them
    if ctx.attention != "auto":
        _set_attention(network, ctx)
    elif _takes_compiled_kernels(ctx):
        # modules with processors, or such as have them by themselves
        compile_attention(
            module for module in network.modules() if isinstance(module, Attention | AttentionModuleMixin)
        )
    if ctx.compile:
        blocks = _named_blocks(network, ctx, "compile")
        compile_forwards(blocks, ctx.device.type, [module for module in network.modules() if _exchanges(module, ctx)])
    if ctx.sequence_parallel > 1:
        hook_blocks(network)  # within what divides and joins their tensors
        divide_sequence(network, ctx)
    if ctx.quantization != "none":
        _quantize(network, ctx)
    if ctx.offload != "none":
        _check_library(network, ctx, "offload")
        offload(network, ctx.device)
    elif ctx.fused and not (ctx.compile or ctx.gguf) and ctx.lora is None and ctx.quantization == "none":
        fuse_after_first_call(network, keep)
    else:
        pack(network, keep, activations=ctx.lora is None)
    if ctx.recorded and ctx.lora is None and ctx.offload == "none" and ctx.ways is None:
        if ctx.device.type == "cuda":
            network.forward = NetworkGraphs(network.forward, ctx.device, CudaRecorder(ctx.device))
        elif (compiled := library()) is not None and _takes_compiled_kernels(ctx):
            network.forward = NetworkGraphs(network.forward, ctx.device, CpuRecorder(compiled))
    return network


def _loaded(ctx: LoadContext, component: str, load: Callable[[LoadContext, str], nn.Module]) -> Any:
    file = ctx.gguf.get(component)
    return load(ctx, component) if file is None else read_gguf(ctx, component, Path(file))


def played_back(network: nn.Module) -> bool:
    """Whether calls of equal shapes are recorded: it is worth something to have few shapes."""
    return isinstance(network.forward, NetworkGraphs)


def recordings_bytes(network: nn.Module) -> int:
    """What recorded calls of a network hold at most, beside its weights and what is accounted to calls."""
    return network.forward.held_bytes if isinstance(network.forward, NetworkGraphs) else 0


@contextmanager
def launched_one_by_one(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Within it, calls of the networks are not those recorded: something else decides what they do."""
    with ExitStack() as stack:
        for network in networks:
            if isinstance(network.forward, NetworkGraphs):
                stack.enter_context(network.forward.eager())
        yield


def offload(network: Any, device: torch.device) -> None:
    """Weights of `network` come to `device` block by block: to a GPU, the next while one is computed."""
    network.enable_group_offload(
        onload_device=device,
        offload_device=_CPU,
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=device.type == "cuda",
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


def _takes_compiled_kernels(ctx: LoadContext) -> bool:
    return (
        library() is not None
        and (ctx.device.type, ctx.dtype) == ("cpu", torch.float32)
        and not ctx.compile
        and ctx.sequence_parallel == 1
    )


def _exchanges(module: nn.Module, ctx: LoadContext) -> bool:
    """Whether ranks wait for each other in it. Such must not be traced: what the library asks other ranks in attention
    (their lengths) it asks while it is traced, and nobody says that they trace it as often, or at the same call."""
    if isinstance(module, RowParallel | SummedRMSNorm):
        return True
    return ctx.sequence_parallel > 1 and isinstance(module, Attention | AttentionModuleMixin)


def _set_attention(network: Any, ctx: LoadContext) -> None:
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


def _check_library(network: object, ctx: LoadContext, key: str) -> None:
    if not isinstance(network, ModelMixin):
        raise ConfigError(
            f"stage {ctx.stage!r}: {key} is set, but {type(network).__name__} is no model of diffusers, which does it",
            field=f"stages.{ctx.stage}.{key}",
        )


def _check_lora(ctx: LoadContext) -> None:
    """Adapters are added to plain linear layers that run as they are."""
    for key, given in (("quantization", ctx.quantization), ("offload", ctx.offload), ("compile", ctx.compile)):
        if ctx.lora is not None and given not in ("none", False):
            raise ConfigError(
                f"stage {ctx.stage!r}: {key} does not go with lora; leave one out", field=f"stages.{ctx.stage}.{key}"
            )


def _check_offload(ctx: LoadContext) -> None:
    if ctx.compile:
        raise ConfigError(
            f"stage {ctx.stage!r}: offload does not go with compile; leave one out",
            field=f"stages.{ctx.stage}.offload",
        )
