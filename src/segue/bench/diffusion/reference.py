"""`python -m segue.bench.diffusion.reference SOCKET_FD OPTIONS`: serve a pipeline of `diffusers` in its own process.

It takes one request at a time, or lists of prompts with equal numbers of steps in one call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from segue.bench.diffusion.workload import ImageRequest
from segue.bench.harness.process import Generate, ModelOptions, serve_batches

TRUE_CFG = "true_cfg_scale"


class Options(ModelOptions, kw_only=True):
    """Options for loading the pipeline."""

    sizes: list[int]
    """Sizes of images in pixels, for which the operations of one network call are counted."""


class Loaded(msgspec.Struct, tag=True):
    """The pipeline is loaded."""

    versions: dict[str, str]
    flops: dict[int, float]
    """By size: floating-point operations of one call of the network for one row."""
    ceiling: float
    """Operations per second of a matmul of two large matrices, with the same number of threads."""


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """One image."""

    index: int
    image: bytes
    network: float = 0.0
    """Seconds of the network's calls for it: its share of calls with several images."""


def load(options: Options) -> tuple[Loaded, Callable[[str], Generate[ImageRequest]]]:
    """Load the pipeline; both ways of serving are the same call, in which requests of equal numbers of steps share."""
    import torch

    from segue.bench.harness.device import matmul_ceiling
    from segue.kernels import ensure_torchvision
    from segue.parallel.wire import dtype_of

    ensure_torchvision()
    from diffusers import DiffusionPipeline

    torch.set_num_threads(options.threads)
    dtype = dtype_of(options.dtype)
    pipeline = DiffusionPipeline.from_pretrained(options.model_dir, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    flops = {size: _flops(pipeline, size) for size in options.sizes}
    versions = {name: version(name) for name in ("torch", "transformers", "diffusers")}
    watch = _Watch(_network(pipeline))

    def generate(requests: Sequence[ImageRequest]) -> Iterator[Answer]:
        for steps in dict.fromkeys(one.steps for one in requests):
            yield from _generate(pipeline, [one for one in requests if one.steps == steps], watch)

    return Loaded(versions, flops, matmul_ceiling(torch.device("cpu"), dtype)), lambda way: generate


class _Watch:
    """Measures the seconds that a network spends in its calls."""

    def __init__(self, network: Any) -> None:
        self.seconds = 0.0
        self._began = 0.0
        network.register_forward_pre_hook(self._begin)
        network.register_forward_hook(self._end)

    def _begin(self, network: Any, given: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, network: Any, given: Any, made: Any) -> None:
        self.seconds += time.perf_counter() - self._began


def _generate(pipeline: Any, requests: Sequence[ImageRequest], watch: _Watch | None = None) -> list[Answer]:
    """Run one call of the pipeline."""
    import numpy as np
    import torch

    first = requests[0]
    before = 0.0 if watch is None else watch.seconds
    made = pipeline(
        prompt=[one.prompt for one in requests],
        negative_prompt=[one.negative_prompt for one in requests],
        height=first.size,
        width=first.size,
        num_inference_steps=first.steps,
        generator=[torch.Generator().manual_seed(one.seed) for one in requests],
        **guided(type(pipeline).__name__, first.guidance),
    ).images
    network = 0.0 if watch is None else (watch.seconds - before) / len(requests)
    return [
        Answer(index=one.index, image=np.asarray(image.convert("RGB"), np.uint8).tobytes(), network=network)
        for one, image in zip(requests, made, strict=True)
    ]


def guided(pipeline: str, guidance: float) -> dict[str, float]:
    """The argument for true classifier-free guidance of pipelines of this class."""
    return {TRUE_CFG if pipeline.startswith("QwenImage") else "guidance_scale": guidance}


def _network(pipeline: Any) -> Any:
    """The denoiser of a pipeline."""
    parts = pipeline.components
    return parts["transformer"] if "transformer" in parts else parts["unet"]


def _flops(pipeline: Any, size: int) -> float:
    """Floating-point operations of one call of the network for one row: matmuls and attention, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    network = _network(pipeline)
    counts: list[float] = []
    forward = network.forward

    def counted(*arguments: Any, **named: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            output = forward(*arguments, **named)
        counts.append(counter.get_total_flops() / output[0].shape[0])
        return output

    network.forward = counted
    try:
        _generate(pipeline, [ImageRequest(0, "a cat", "", 1.0, size, 2, 0)])
    finally:
        del network.forward
    return counts[0]


if __name__ == "__main__":
    sys.exit(serve_batches(sys.argv[1:], Options, ImageRequest, load))
