"""The weights of a denoiser on two ranks, in two threads: the same images as on one, of each family that has it."""

from __future__ import annotations

import itertools
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_adapters import drawn, write
from diffusion_chain import WITHIN, Chain, apart, pipeline_of
from row_rank_process import CPU, Led, denoiser, ranked
from safetensors.torch import load_file, save_file
from torch import nn

from segue.engines.diffusion.contract import DenoiserContext, DiffusionModel
from segue.engines.ranks import follow
from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import ConfigError
from segue.models.images.sdxl import tiny as sdxl
from segue.models.images.sdxl.denoiser import SdxlDenoiser
from segue.parallel.group import Group
from segue.parallel.layers import SummedRMSNorm
from segue.parallel.ranks import Ranks
from segue.parallel.ways import Shape, Ways, meet

ASKED = {"prompt": "a small boat left the harbour", "height": 64, "width": 64, "num_inference_steps": 2, "seed": 3}
VIDEO = {"num_frames": 5, "negative_prompt": "grey"}
LONG = {**ASKED, "num_inference_steps": 6}
INKS = ("ink", "oil")


def all_ways(meeting: Path, shape: Shape) -> list[Ways]:
    """Of threads: each waits for the others."""
    made: dict[int, Ways] = {}

    def come(rank: int) -> None:
        made[rank] = meet(rank, shape, meeting, CPU)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(shape.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(shape.size)]


@contextmanager
def led(first: DiffusionModel, second: DiffusionModel, met: list[Ways]) -> Iterator[Led]:
    near, far = socket.socketpair()

    def live() -> None:
        ranks = Ranks(met[1].everyone, [far])
        with torch.inference_mode():
            follow(ranked(second, met[1], ranks), ranks)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        yield Led(first, met[0], [near])
    finally:
        near.close()
        thread.join(240)
        far.close()


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen_image", {"negative_prompt": "grey, and without any colour", "true_cfg_scale": 3.0}),
        ("wan", VIDEO),
        ("flux", {}),
        ("stable_diffusion_3", {"negative_prompt": "grey"}),
        ("z_image", {}),
    ],
)
def test_two_equal_one(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    directory = tmp_path / family
    import_module(f"segue.models.images.{family}.tiny").make(directory)
    chain = Chain(directory)
    cases = [{**ASKED, **more}, {**ASKED, **more, "prompt": "a red bicycle", "seed": 4}]
    expected = [chain.run(case)[0] for case in cases]
    met = all_ways(tmp_path / "meeting", Shape(weights=2))
    ranks = [denoiser(directory, {}, ways) for ways in met]
    assert all(rank.weight_bytes < chain.adapters["denoiser"].weight_bytes for rank in ranks)
    with led(ranks[0], ranks[1], met) as leader:
        divided = chain.through(leader)
        for one, case in zip(divided.run(*cases, late={1: 1}), expected, strict=True):
            assert apart(one, case.pixels) < WITHIN


def test_adapters_and_step_caches(tmp_path: Path) -> None:
    """Of every layer: cut by outputs, by inputs, by two kinds of inputs, and not at all."""
    directory = tmp_path / "flux"
    import_module("segue.models.images.flux.tiny").make(directory)
    network = pipeline_of(directory, "FluxPipeline").transformer
    lora = {"adapters": {name: str(write(tmp_path / name, drawn(network, 4, seed))) for seed, name in enumerate(INKS)}}
    chain = Chain(directory, lora=LoraPlan(**lora))
    cases = [
        ASKED,
        *({**ASKED, "adapter": name} for name in INKS),
        {**LONG, "adapter": "ink", "step_cache": "first_block", "step_cache_threshold": 0.5},
        {**LONG, "step_cache": "teacache", "step_cache_threshold": 0.5},
        {**LONG, "step_cache": "taylorseer"},
    ]
    expected = [chain.run(case)[0] for case in cases]
    met = all_ways(tmp_path / "meeting", Shape(weights=2))
    ranks = [denoiser(directory, {"lora": lora}, ways) for ways in met]
    with led(ranks[0], ranks[1], met) as leader:
        divided = chain.through(leader)
        for one, case in zip(divided.run(*cases, late={1: 1}), expected, strict=True):
            assert apart(one, case.pixels) < WITHIN
    for one, other in itertools.combinations(expected, 2):
        assert apart(one, other.pixels) > WITHIN, "adapters and caches show"


def test_other_weights_there_are_seen(tmp_path: Path) -> None:
    directory = tmp_path / "flux"
    import_module("segue.models.images.flux.tiny").make(directory)
    chain = Chain(directory)
    expected = chain.run(ASKED)[0]
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    [path] = (other / "transformer").glob("*.safetensors")
    tensors = load_file(path)
    tensors["transformer_blocks.0.attn.to_v.weight"][-1, 0] += 1.0  # of the last head
    save_file(tensors, path, {"format": "pt"})
    met = all_ways(tmp_path / "meeting", Shape(weights=2))
    with led(denoiser(directory, {}, met[0]), denoiser(other, {}, met[1]), met) as leader:
        divided = chain.through(leader)
        assert apart(divided.run(ASKED)[0], expected.pixels) > WITHIN


def test_a_norm_over_all_heads() -> None:
    whole = nn.RMSNorm(8, eps=1e-6)
    whole.weight.data = torch.rand(8)
    x = torch.randn(3, 8)

    class Other(Group):
        """Rank 0, whose neighbour has the other half."""

        def __init__(self) -> None:
            """Nobody is met."""

        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + x[:, 4:].square().sum(-1, keepdim=True)

    part = SummedRMSNorm(whole.weight.data[:4], 8, 1e-6, Other())
    torch.testing.assert_close(part(x[:, :4]), whole(x)[:, :4].detach())


def test_what_cannot_be_divided_is_named(tmp_path: Path) -> None:
    sdxl.make(tmp_path / "sdxl")
    flux = import_module("segue.models.images.flux.tiny")
    flux.make(tmp_path / "flux")
    three = Group(0, 1, tmp_path / "one", CPU)
    three.size = 3
    keys: dict[str, Any] = {"ways": Ways(Shape(weights=3), *[three] * 5)}
    with pytest.raises(ConfigError, match="UNet2DConditionModel cannot be run tensor parallel: its blocks are not"):
        SdxlDenoiser(DenoiserContext(tmp_path / "sdxl", "denoiser", CPU, torch.float32, **keys))
    with pytest.raises(ConfigError, match=r"has . heads, which 3 does not divide; tensor_parallel is 3") as caught:
        denoiser(tmp_path / "flux", {}, keys["ways"])
    assert caught.value.field == "stages.denoiser.tensor_parallel"
