"""Several ways at once, on four processes: the same images as on one."""

from __future__ import annotations

import itertools
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry
from diffusion_adapters import drawn, write
from diffusion_chain import WITHIN, Chain, apart, pipeline_of
from row_rank_process import Followers, compiled_eagerly

from segue.graph.deployment.options import LoraPlan
from segue.models.shared.diffusion.denoiser.tuning import blocks_of

ASKED = {"prompt": "a small boat left the harbour", "height": 64, "width": 64, "num_inference_steps": 2, "seed": 3}
GUIDED = {"negative_prompt": "grey, and without any colour", "true_cfg_scale": 3.0}
VIDEO = {"num_frames": 5, "negative_prompt": "grey"}
GREY = {"negative_prompt": "grey"}
GRID = {"sequence_parallel": 4, "sequence_ring": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "keys", "more"),
    [
        pytest.param("qwen_image", {"cfg_parallel": 2, "tensor_parallel": 2}, GUIDED, marks=pytest.mark.nightly),
        pytest.param("qwen_image", GRID, GUIDED, marks=pytest.mark.nightly),  # test_truth_divided_denoiser has it
        ("wan", {"cfg_parallel": 2, "sequence_parallel": 2, "sequence_ring": 2}, VIDEO),
        pytest.param("wan", GRID, VIDEO, marks=pytest.mark.nightly),
        ("flux", {"sequence_parallel": 2, "sequence_ring": 2, "tensor_parallel": 2}, {}),
        pytest.param("stable_diffusion_3", {"cfg_parallel": 2, "tensor_parallel": 2}, GREY, marks=pytest.mark.nightly),
    ],
)
def test_four_equal_one(
    family: str, keys: dict[str, Any], more: dict[str, Any], tmp_path: Path, followers: Followers
) -> None:
    directory = tmp_path / family
    import_module(f"segue.models.images.{family}.tiny").make(directory)
    chain = Chain(directory)
    asked = {**ASKED, **more}
    # texts of other lengths, with and without guidance, and an image whose tokens four do not divide evenly
    plain = {key: value for key, value in asked.items() if key not in ("negative_prompt", "true_cfg_scale")}
    cases = [
        asked,
        {**plain, "prompt": "a red bicycle stands in front of an old house", "seed": 4},
        {**asked, "height": 80, "width": 80, "seed": 5},
    ]
    expected = [chain.run(case)[0] for case in cases]
    with followers.joined(directory, tmp_path / "meeting", keys) as leader:
        divided = chain.through(leader)
        for one, case in zip(divided.run(*cases, late={1: 1}), expected, strict=True):
            assert apart(one, case.pixels) < WITHIN


def test_adapters_and_step_caches(qwen_image_dir: Path, tmp_path: Path, followers: Followers) -> None:
    """An adapter, guidance and each step cache in one request, and beside others."""
    network = pipeline_of(qwen_image_dir, "QwenImagePipeline").transformer
    lora = {"adapters": {"ink": str(write(tmp_path / "ink", drawn(network, 4, 1)))}}
    options = {"teacache_coefficients": [1.0, 0.0]}
    chain = Chain(qwen_image_dir, lora=LoraPlan(**lora), options={"denoiser": options})
    inked = {**ASKED, **GUIDED, "adapter": "ink", "num_inference_steps": 6}
    cases: list[dict[str, Any]] = [
        inked,
        {**inked, "step_cache": "taylorseer"},
        {**inked, "step_cache": "first_block", "step_cache_threshold": 1.1},
        {**inked, "step_cache": "teacache", "step_cache_threshold": 0.5, "guidance_interval": (0.0, 0.7)},
        {**ASKED, **GUIDED},
    ]
    expected = [chain.run(case)[0] for case in cases]
    keys = {"cfg_parallel": 2, "sequence_parallel": 2, "lora": lora, "options": options}
    with followers.joined(qwen_image_dir, tmp_path / "meeting", keys) as leader:
        divided = chain.through(leader)
        for one, case in zip(divided.run(*cases, late={1: 1}), expected, strict=True):
            assert apart(one, case.pixels) < WITHIN
    for one, other in itertools.combinations(expected, 2):
        assert apart(one, other.pixels) > WITHIN, "adapters and caches show"


@pytest.mark.parametrize(
    ("family", "keys", "more"),
    [
        ("qwen_image", {"sequence_parallel": 2, "offload": "layerwise"}, GUIDED),
        ("wan", {"tensor_parallel": 2, "offload": "layerwise"}, VIDEO),
    ],
)
def test_weights_that_wait_elsewhere(
    family: str, keys: dict[str, Any], more: dict[str, Any], tmp_path: Path, followers: Followers
) -> None:
    """The blocks' own hooks and the ranks' do not get in each other's way."""
    directory = tmp_path / family
    import_module(f"segue.models.images.{family}.tiny").make(directory)
    chain = Chain(directory)
    cases = [{**ASKED, **more}, {**ASKED, **more, "height": 80, "width": 80, "seed": 5}]
    expected = [chain.run(case)[0] for case in cases]
    with followers.joined(directory, tmp_path / "meeting", keys) as leader:
        divided = chain.through(leader)
        for one, case in zip(divided.run(*cases), expected, strict=True):
            assert apart(one, case.pixels) < WITHIN
        blocks = blocks_of(leader.model.network)
        hooks = [HookRegistry.check_if_exists_or_initialize(block).get_hook("group_offloading") for block in blocks]
    assert hooks
    assert None not in hooks


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen_image", {"sequence_parallel": 2}),
        pytest.param("flux", {"tensor_parallel": 2}, marks=pytest.mark.nightly),
    ],
)
def test_compiled_blocks(family: str, keys: dict[str, Any], tmp_path: Path, followers: Followers) -> None:
    """Ranks may trace blocks as often as they like, and whenever: nothing that they exchange is traced."""
    directory = tmp_path / family
    import_module(f"segue.models.images.{family}.tiny").make(directory)
    chain = Chain(directory)
    # tokens that the ranks do not divide evenly: they ask each other for lengths
    asked = {**ASKED, "height": 80, "width": 80}
    expected = chain.run(asked)[0]
    torch._dynamo.utils.counters.clear()
    compiling = {**keys, "compile": True}
    with compiled_eagerly() as graphs, followers.joined(directory, tmp_path / "meeting", compiling) as leader:
        divided = chain.through(leader)
        assert apart(divided.run(asked)[0], expected.pixels) < WITHIN
    traced = torch._dynamo.utils.counters
    assert graphs
    assert traced["stats"]["unique_graphs"] > 0
    assert any("disable" in reason for reason in traced["graph_break"]), "code ends where ranks exchange something"
