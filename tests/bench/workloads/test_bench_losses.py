"""`segue bench diffusion --losses`: errors and speeds that follow from the images."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor
from safetensors.torch import load_file

from segue.bench.diffusion.arguments import DiffusionBench
from segue.bench.diffusion.losses import (
    CACHES,
    TOGETHER,
    LossResult,
    LossSide,
    Ways,
    faster_sides,
    loss,
    markdown,
    measured,
)
from segue.bench.diffusion.sides import SegueDriver
from segue.bench.diffusion.workload import ImageOutcome, ImageRequest, Mix, images
from segue.bench.figures import full
from segue.bench.harness.checkpoint import RANK, rank_of, write_gguf, write_untrained_lora
from segue.bench.harness.hardware import Machine
from segue.bench.harness.results import write_result
from segue.bench.main import parser
from segue.engines.diffusion.contract import DenoiserContext
from segue.messages.errors import InvalidRequest
from segue.models.images.flux import tiny as flux
from segue.models.images.stable_diffusion_3 import tiny as stable_diffusion_3
from segue.models.shared.diffusion.denoiser.gguf_files import read_gguf


def outcome(index: int, jct: float, image: np.ndarray) -> ImageOutcome:
    return ImageOutcome(index=index, steps=4, jct=jct, first_preview=jct, image=image.astype(np.uint8).tobytes())


def test_errors_and_speeds() -> None:
    grey = np.full((8, 8, 3), 100)
    exact = [outcome(0, 2.0, grey), outcome(1, 4.0, grey)]
    other = [outcome(0, 1.0, grey), outcome(1, 1.0, grey + 51)]  # 0.2 of the range, in one of two
    figures = loss(other, exact)
    assert figures.speed == pytest.approx(3.0)
    assert figures.psnr == pytest.approx(-10 * np.log10(0.04 / 2))
    assert figures.lowest_psnr == pytest.approx(-10 * np.log10(0.04))
    assert figures.largest_difference == pytest.approx(0.2)
    assert figures.mean_difference == pytest.approx(0.1)
    same = loss(exact, exact)
    assert (same.psnr, same.lowest_psnr, same.speed) == (None, None, 1.0)


@dataclass
class Painter:
    """A side without a model: an image is of one colour but for one pixel. `serving`: the names of those that are."""

    name: str
    colour: int
    serving: list[str]
    most: list[int]
    """The largest number of them at once, so far."""
    refuses: bool = False
    startup: float = 0.0

    async def start(self) -> None:
        self.serving.append(self.name)
        self.most[0] = max(self.most[0], len(self.serving))

    async def take_over(self, together: int) -> None:
        assert self.name in self.serving

    async def hand_over(self) -> None:
        pass

    async def stop(self) -> None:
        self.serving.remove(self.name)

    async def run(self, request: ImageRequest) -> ImageOutcome:
        if self.refuses:
            raise InvalidRequest("not made of blocks")
        image = np.full((request.size, request.size, 3), self.colour)
        image[0, 0] = 0
        return outcome(request.index, 1.0, image)


def test_two_models_are_in_memory_at_once_and_no_more() -> None:
    serving, most = [], [0]
    names = {"exact": 100, "cache": 110, "other cache": 110, "int8": 120, "int4": 130, "fp8": 140}
    sides = {name: Painter(name, colour, serving, most) for name, colour in names.items()}
    sides["other cache"].refuses = sides["int4"].refuses = True
    same, own = ([sides[name] for name in some] for some in (["cache", "other cache"], ["int8", "int4", "fp8"]))
    for way in same:  # these are the exact one's
        way.serving, way.most = ["cache", "other cache"], [0]
    warm, *asked = (images(Mix((2,), (1,)), 8, start, 2, 1.0, seed=0) for start in (0, 2, 4))

    async def all_of_it() -> tuple[dict[str, LossSide], list[str]]:
        await sides["exact"].start()
        ways = Ways(same, own, ["GGUF: needs the package gguf"])
        return await measured(sides["exact"], ways, warm[0], asked, lambda line: None)

    made, refused = asyncio.run(all_of_it())
    assert list(made) == ["exact", "cache", "int8", "fp8", TOGETHER]
    assert made["exact"].psnr is made[TOGETHER].psnr is None
    for name in ("cache", "int8", "fp8"):
        assert made[name].largest_difference == pytest.approx((names[name] - 100) / 255)
    assert refused == [
        "GGUF: needs the package gguf", "other cache: not made of blocks", "int4: not made of blocks",
    ]  # fmt: skip
    assert (serving, most) == (["exact"], [2])


def test_a_result_is_read_again(tmp_path: Path) -> None:
    grey = np.full((8, 8, 3), 100)
    exact, other = [outcome(0, 2.0, grey)], [outcome(0, 1.0, grey + 51)]
    result = LossResult(
        finished="2026-01-02T00:00:00+00:00",
        machine=Machine("a cpu", 2, 2**34, [], "Linux", "3.11", {"torch": "2"}, (0.0, 0.0, 0.0)),
        model="tiny",
        pipeline="SomePipeline",
        dtype="float32",
        size=8,
        steps="all of 4 steps",
        images=1,
        guidance=1.0,
        seed=0,
        sides={"segue": loss(exact, exact), "segue, int8": loss(other, exact), TOGETHER: loss(exact, exact)},
        refused=["segue, first_block 0.1: not made of blocks"],
    )
    path = tmp_path / "losses.json"
    write_result(result, path)
    assert msgspec.json.decode(path.read_bytes(), type=LossResult) == result
    text = markdown(result)
    for part in ("| segue, int8 | 1.00 | 2.00× | 14.0 | 14.0 | 0.2000 / 0.2000 |", "equal", "not made of blocks"):
        assert part in text, part
    assert "## Losses: SomePipeline" in full(path)


def test_the_option() -> None:
    asked = parser().parse_args(["diffusion", "--losses", "--step-cache", "first_block:0.4"])
    assert asked.losses
    assert asked.step_cache == [("first_block", 0.4)]


def test_the_sides(tmp_path: Path) -> None:
    """Every way is there; a distilled model's guidance is no second row, so it has no interval."""
    flux.make(tmp_path / "flux")
    exact = SegueDriver(tmp_path / "flux", "FluxPipeline", "float32", {})
    bench = DiffusionBench(step_cache=[("taylorseer", None)], few_steps=3)
    ways = faster_sides(exact, bench, tmp_path)
    whole = [] if torch.cuda.is_available() else ["bfloat16"]
    kinds = [*whole, "int8", "int4", "fp8", "GGUF Q8_0", "GGUF Q4_0"]
    assert [side.name for side in ways.same] == ["segue, taylorseer"]
    assert [side.name for side in ways.own] == [f"segue, {name}" for name in (*kinds, "3 steps with untrained LoRA")]
    assert ways.refused == []
    stable_diffusion_3.make(tmp_path / "sd3")
    exact = SegueDriver(tmp_path / "sd3", "StableDiffusion3Pipeline", "float32", {})
    bench = DiffusionBench(few_steps=3, few_steps_lora=tmp_path / "untrained.safetensors")
    ways = faster_sides(exact, bench, tmp_path)
    assert [side.name for side in ways.same][len(CACHES) :] == ["segue, guidance_interval 0.2-0.8"]
    assert ways.own[-1].name == "segue, 3 steps with LoRA"


def test_the_files(tmp_path: Path) -> None:
    """A network as GGUF has its weights but for its type's rounding; an untrained adapter adds zeros to layers there
    are."""
    flux.make(tmp_path / "flux")
    network = tmp_path / "flux" / "transformer"
    weights = load_file(network / "diffusion_pytorch_model.safetensors")
    for kind, share in (("Q8_0", 0.01), ("Q4_0", 0.15)):
        write_gguf(network, tmp_path / f"{kind}.gguf", kind)
        ctx = DenoiserContext(tmp_path / "flux", "denoiser", torch.device("cpu"), torch.float32)
        read = read_gguf(ctx, "transformer", tmp_path / f"{kind}.gguf").state_dict()
        assert set(read) == set(weights)
        packed = {name for name, tensor in read.items() if isinstance(tensor, GGUFParameter)}
        assert "transformer_blocks.0.attn.to_q.weight" in packed
        for name, tensor in read.items():
            if name not in packed:
                assert torch.equal(tensor, weights[name]), name
                continue
            error = (dequantize_gguf_tensor(tensor) - weights[name]).norm() / weights[name].norm()
            assert 0 < float(error) < share, name
    file = tmp_path / "lora.safetensors"
    write_untrained_lora(network, file)
    assert rank_of(file) == rank_of(tmp_path) == RANK
    adapter = load_file(file)
    layers = {name.partition(".lora_")[0].removeprefix("transformer.") for name in adapter}
    assert "single_transformer_blocks.1.attn.to_v" in layers
    for layer in layers:
        down, up = (adapter[f"transformer.{layer}.lora_{side}.weight"] for side in "AB")
        assert (up @ down).shape == weights[f"{layer}.weight"].shape
        assert float(down.std()) > 0
        assert not up.any()
