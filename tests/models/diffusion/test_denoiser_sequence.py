"""The tokens of a denoiser on two processes: the same images as on one, by exchange of heads and by a ring."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_adapters import drawn, write
from diffusion_chain import WITHIN, Chain, apart, pipeline_of
from row_rank_process import Followers
from safetensors.torch import load_file, save_file

from segue.engines.diffusion.contract import DenoiserContext
from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import ConfigError
from segue.models.images.sdxl import tiny as sdxl
from segue.models.images.sdxl.denoiser import SdxlDenoiser
from segue.models.shared.diffusion.denoiser.sequence_parallel import check_sequence
from segue.parallel.group import Group
from segue.parallel.ways import Shape, Ways

CPU = torch.device("cpu")
ASKED = {"prompt": "a small boat left the harbour", "height": 64, "width": 64, "num_inference_steps": 2, "seed": 3}
GUIDED = {"negative_prompt": "grey, and without any colour", "true_cfg_scale": 3.0}
RING = {"ulysses": 1, "ring": 2}
VIDEO = {"num_frames": 5, "negative_prompt": "grey"}


def cases(more: dict[str, Any]) -> list[dict[str, Any]]:
    """Texts of other lengths in one batch, and an image whose tokens two do not divide evenly."""
    asked = {**ASKED, **more}
    return [
        asked,
        {**asked, "prompt": "a red bicycle stands in front of an old house", "seed": 4},
        {**asked, "height": 80, "width": 80, "seed": 5},
    ]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "mode", "more"),
    [
        ("qwen_image", "ulysses", GUIDED),
        ("qwen_image", "ring", GUIDED),
        pytest.param("wan", "ulysses", VIDEO, marks=pytest.mark.nightly),
        ("wan", "ring", VIDEO),
        ("flux", "ulysses", {}),
        pytest.param("flux", "ring", {}, marks=pytest.mark.nightly),
    ],
)
def test_two_equal_one(family: str, mode: str, more: dict[str, Any], tmp_path: Path, followers: Followers) -> None:
    directory = tmp_path / family
    import_module(f"segue.models.images.{family}.tiny").make(directory)
    chain = Chain(directory)
    whole = lengths(chain.adapters["denoiser"])
    expected = [chain.run(case)[0] for case in cases(more)]
    keys = {"sequence_parallel": 2, "sequence_ring": RING[mode]}
    with followers.joined(directory, tmp_path / "meeting", keys) as leader:
        part = lengths(leader.model)
        divided = chain.through(leader)
        together = divided.run(*cases(more), late={1: 1})
        for one, case in zip(together, expected, strict=True):
            assert apart(one, case.pixels) < WITHIN
        assert part == {-(-tokens // 2) for tokens in whole}, "each computes half of them"


def test_adapters_and_step_caches(qwen_image_dir: Path, tmp_path: Path, followers: Followers) -> None:
    network = pipeline_of(qwen_image_dir, "QwenImagePipeline").transformer
    lora = {"adapters": {"ink": str(write(tmp_path / "ink", drawn(network, 4, 1)))}}
    options = {"teacache_coefficients": [1.0, 0.0]}
    chain = Chain(qwen_image_dir, lora=LoraPlan(**lora), options={"denoiser": options})
    asked = {**ASKED, "num_inference_steps": 6, "step_cache_threshold": 1.0}
    cases: list[dict[str, Any]] = [
        {**ASKED, "adapter": "ink"},
        {**asked, **GUIDED, "step_cache": "first_block"},
        {**asked, "step_cache": "teacache", "height": 80, "width": 80},
        {**asked, "step_cache": "teacache", "adapter": "ink"},
    ]
    expected = [chain.run(case)[0] for case in cases]
    keys = {"sequence_parallel": 2, "lora": lora, "options": options}
    with followers.joined(qwen_image_dir, tmp_path / "meeting", keys) as leader:
        divided = chain.through(leader)
        for one, case in zip(divided.run(*cases, late={1: 1}), expected, strict=True):
            assert apart(one, case.pixels) < WITHIN
        plain = divided.run({**asked, **GUIDED, "step_cache_threshold": None}, {**ASKED})
    assert apart(expected[1], plain[0].pixels) > WITHIN
    assert apart(expected[0], plain[1].pixels) > WITHIN


def lengths(denoiser: Any) -> set[int]:
    """Where it is noted how many tokens of an image come out of its blocks."""
    noted: set[int] = set()
    denoiser.network.norm_out.register_forward_pre_hook(lambda module, given: noted.add(given[0].shape[1]))
    return noted


def test_other_weights_there_are_seen(tmp_path: Path, followers: Followers) -> None:
    directory = tmp_path / "flux"
    import_module("segue.models.images.flux.tiny").make(directory)
    chain = Chain(directory)
    expected = chain.run(ASKED)[0]
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    [path] = (other / "transformer").glob("*.safetensors")
    tensors = load_file(path)
    tensors["transformer_blocks.0.attn.to_v.weight"][0, 0] += 1.0
    save_file(tensors, path, {"format": "pt"})
    keys = {"sequence_parallel": 2, "sequence_ring": 2}
    with followers.joined(directory, tmp_path / "meeting", keys, follower=other) as leader:
        divided = chain.through(leader)
        assert apart(divided.run(ASKED)[0], expected.pixels) > WITHIN


def test_a_network_without_a_plan_is_named(tmp_path: Path) -> None:
    sdxl.make(tmp_path / "sdxl")
    context = DenoiserContext(tmp_path / "sdxl", "denoiser", CPU, torch.float32, ways=said(tmp_path, Shape(tokens=2)))
    with pytest.raises(ConfigError, match="UNet2DConditionModel cannot be run sequence parallel: diffusers has"):
        SdxlDenoiser(context)


def said(tmp_path: Path, shape: Shape) -> Ways:
    """Of a rank that has met nobody."""
    alone = Group(0, 1, tmp_path / "meeting", CPU)
    return Ways(shape, *[alone] * 5)


@pytest.mark.parametrize(
    ("device", "dtype", "mode", "attention", "field"),
    [
        ("cuda", torch.bfloat16, "ring", "native", "attention"),
        ("cuda", torch.bfloat16, "ulysses", "xformers", "attention"),
        ("cuda", torch.float32, "ring", "auto", "dtype"),
    ],
)
def test_what_does_not_go_together_is_named(
    device: str, dtype: torch.dtype, mode: str, attention: str, field: str
) -> None:
    context = DenoiserContext(Path(), "denoiser", torch.device(device), dtype, attention=attention)
    context.sequence_ring = RING[mode]
    with pytest.raises(ConfigError) as caught:
        check_sequence(context)
    assert caught.value.field == f"stages.denoiser.{field}"
