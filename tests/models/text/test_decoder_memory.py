"""Decoders that run out of memory: in tiles, once more, or a message that says what fits. Layers raise what PyTorch's
allocator raises where they are given more than there is room for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from segue.engines.contract import LoadContext, StageRequest
from segue.engines.module.engine import ModuleEngine
from segue.messages.errors import StageFailed
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.images.qwen_image import tiny as qwen_image
from segue.models.images.qwen_image.decoder import QwenImageDecoder
from segue.models.images.wan import tiny as wan
from segue.models.images.wan.decoder import WanDecoder

LACKING = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@contextmanager
def room_for(layer: nn.Module, numbers: int, times: int = 1000) -> Iterator[None]:
    """Within it, `layer` fails for larger inputs, so many times."""
    left = times

    def check(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        nonlocal left
        if given[0].numel() > numbers and left:
            left -= 1
            raise RuntimeError(LACKING)

    hook = layer.register_forward_pre_hook(check)
    yield
    hook.remove()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> QwenImageDecoder:
    return QwenImageDecoder(_loaded(qwen_image.make, tmp_path_factory))


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> WanDecoder:
    return WanDecoder(_loaded(wan.make, tmp_path_factory))


def _loaded(make: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadContext:
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    make(directory)
    return LoadContext(directory, "decoder", torch.device("cpu"), torch.float32)


def latents(decoder: Any, *sides: int) -> torch.Tensor:
    shape = (1, decoder.vae.config.z_dim, *sides)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def decoded(decoder: Any, *asked: torch.Tensor) -> list[Any]:
    """The pixels of each, or its error; all are asked for together."""
    engine = ModuleEngine(decoder)
    for number, one in enumerate(asked):
        request = StageRequest(
            request_id=str(number),
            stage="decoder",
            request=Request(request_id=str(number), prompt=""),
            sampling=FALLBACK,
            seed=0,
            upstreams=frozenset({"denoiser"}),
            downstreams=frozenset(),
            to_client=frozenset({"image"}),
        )
        engine.add(request)
        engine.feed(str(number), "denoiser", {"latents": one, "index": 0, "fps": 16.0}, final=True)
    made: dict[str, Any] = {}
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                made[output.request_id] = output.error
            elif output.payload is not None:
                shown = output.payload.get("image", output.payload.get("video"))
                made[output.request_id] = torch.cat(
                    [*([made[output.request_id]] if output.request_id in made else []), shown]
                )
    return [made[str(number)] for number in range(len(asked))]


def test_an_image_that_does_not_fit_is_decoded_in_tiles(images: QwenImageDecoder) -> None:
    large, small = latents(images, 1, 48, 48), latents(images, 1, 8, 8)
    [whole] = decoded(images, large)
    [alone] = decoded(images, small)
    first = images.vae.post_quant_conv
    with room_for(first, latents(images, 1, 32, 32).numel()):
        made, beside = decoded(images, large, small)
    assert made.shape == whole.shape
    assert 0 < (made.int() - whole.int()).abs().float().mean() < 8, "tiles are blended, a small difference"
    assert torch.equal(beside, alone)


def test_one_that_fits_in_no_tiles_is_refused_with_what_fits(images: QwenImageDecoder) -> None:
    large, small = latents(images, 1, 48, 48), latents(images, 1, 8, 8)
    with room_for(images.vae.post_quant_conv, small.numel()):
        error, beside = decoded(images, large, small)
    assert isinstance(error, StageFailed)
    assert "height 384 x width 384 does not fit" in str(error)
    assert "ask for a smaller size" in str(error)
    assert "alloc_cpu" not in str(error)
    assert beside.shape == (64, 64, 3)


def test_frames_are_decoded_once_more(videos: WanDecoder) -> None:
    """What was left behind is given back; frames are the same, and those of a video that fits never are lost."""
    asked = latents(videos, 3, 8, 8)
    [whole] = decoded(videos, asked)
    inner = videos.vae.decoder.conv_out
    with room_for(inner, 0, times=1):
        [made] = decoded(videos, asked)
    assert torch.equal(made, whole)
    with room_for(inner, 0):
        [error] = decoded(videos, asked)
    assert "height 64 x width 64 does not fit" in str(error)
