"""Guidance branches on two processes: the same images as on one, with and without step caches."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_adapters import drawn, write
from diffusion_chain import WITHIN, Chain, apart, pipeline_of
from row_rank_process import Followers
from safetensors.torch import load_file, save_file

from segue.engines.diffusion.contract import DenoiserContext, Row
from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import NotFound, StageFailed
from segue.models.images.qwen_image.denoiser import QwenImageDenoiser

GUIDED = {
    "prompt": "a small boat left the harbour in the early morning",
    "negative_prompt": "grey, and without any colour",
    "true_cfg_scale": 3.0,
    "height": 64,
    "width": 64,
    "num_inference_steps": 9,
    "seed": 3,
}
CASES: tuple[dict[str, Any], ...] = (
    GUIDED,
    {"prompt": "a red bicycle", "height": 64, "width": 64, "num_inference_steps": 3, "seed": 4},
    {**GUIDED, "prompt": "seven brothers", "num_images_per_prompt": 2, "num_inference_steps": 4},
    {**GUIDED, "guidance_interval": (0.2, 0.6), "num_inference_steps": 5},
    {**GUIDED, "step_cache": "first_block", "step_cache_threshold": 1.25},
    {**GUIDED, "step_cache": "taylorseer"},
)


@pytest.fixture(scope="module")
def chain(one_thread: None, qwen_image_dir: Path) -> Chain:
    return Chain(qwen_image_dir)


class Watched(QwenImageDenoiser):
    """It notes what it computes, and may fail."""

    fails = False
    """At the third step."""

    def __init__(self, ctx: DenoiserContext) -> None:
        self.computed = set[int]()
        super().__init__(ctx)

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        if self.fails and rows[0].sample.step == 2:
            raise ValueError("not these")
        self.computed.update(row.branch for row in rows)
        return super().predict(rows)


@pytest.fixture
def watched(one_thread: None, qwen_image_dir: Path) -> Watched:
    return Watched(DenoiserContext(qwen_image_dir, "denoiser", torch.device("cpu"), torch.float32))


def test_two_equal_one(
    chain: Chain, watched: Watched, qwen_image_dir: Path, tmp_path: Path, followers: Followers
) -> None:
    expected = [chain.run(case)[0] for case in CASES]
    with followers.led(watched, qwen_image_dir, tmp_path / "meeting") as leader:
        divided = chain.through(leader)
        together = divided.run(*CASES, late={1: 1, 3: 2, 4: 3})
        for one, case in zip(together, expected, strict=True):
            assert apart(one, case.pixels) < WITHIN
        assert watched.computed == {0}, "the others are computed elsewhere"


def test_adapters(qwen_image_dir: Path, tmp_path: Path, followers: Followers) -> None:
    """One that is loaded with the stage, and one that comes later."""
    network = pipeline_of(qwen_image_dir, "QwenImagePipeline").transformer
    ink, oil = (str(write(tmp_path / name, drawn(network, 4, seed))) for seed, name in enumerate(("ink", "oil")))
    chain = Chain(qwen_image_dir, lora=LoraPlan({"ink": ink, "oil": oil}))
    cases: list[dict[str, Any]] = [{**GUIDED, "num_inference_steps": 3, "adapter": name} for name in ("ink", "oil")]
    inked = {**GUIDED, "num_inference_steps": 6, "adapter": "ink"}
    cases.append({**inked, "step_cache": "taylorseer"})
    cases.append({**inked, "step_cache": "first_block", "step_cache_threshold": 1.25})
    expected = [chain.run(case)[0] for case in cases]
    keys = {"lora": {"adapters": {"ink": ink}}}
    with followers.joined(qwen_image_dir, tmp_path / "meeting", keys) as leader:
        assert leader.lora is not None
        leader.lora.load("oil", oil)
        divided = chain.through(leader)
        for one, case in zip(divided.run(*cases, late={1: 1}), expected, strict=True):
            assert apart(one, case.pixels) < WITHIN
        leader.lora.unload("oil")
        with pytest.raises(NotFound, match="there is no LoRA adapter 'oil'"):
            divided.run(cases[1])
    assert apart(expected[0], expected[1].pixels) > WITHIN


def test_other_weights_there_are_seen(chain: Chain, qwen_image_dir: Path, tmp_path: Path, followers: Followers) -> None:
    expected = chain.run(GUIDED)[0]
    other = Path(shutil.copytree(qwen_image_dir, tmp_path / "other"))
    [path] = (other / "transformer").glob("*.safetensors")
    tensors = load_file(path)
    tensors["transformer_blocks.1.attn.to_v.weight"][0, 0] += 1.0
    save_file(tensors, path, {"format": "pt"})
    with followers.led(chain.adapters["denoiser"], other, tmp_path / "meeting") as leader:
        divided = chain.through(leader)
        assert apart(divided.run(GUIDED)[0], expected.pixels) > WITHIN


def test_an_error_of_one_rank_leaves_them_in_step(
    chain: Chain, watched: Watched, qwen_image_dir: Path, tmp_path: Path, followers: Followers
) -> None:
    expected = chain.run(GUIDED)[0]
    with followers.led(watched, qwen_image_dir, tmp_path / "meeting") as leader:
        divided = chain.through(leader)
        watched.fails = True
        with pytest.raises(StageFailed, match="ValueError: not these"):
            divided.run(GUIDED)
        watched.fails = False
        assert apart(divided.run(GUIDED)[0], expected.pixels) < WITHIN
