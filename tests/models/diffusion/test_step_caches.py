"""Step caches: what diffusers makes with the same cache, whoever shares the calls; exact requests beside stay exact."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of
from torch import nn

from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.registry import tiny_preset
from segue.models.shared.diffusion.denoiser.block_cache import BlockCache

GUIDED = {
    "prompt": "a small boat left the harbour in the early morning",
    "negative_prompt": "grey, and without any colour",
    "true_cfg_scale": 3.0,
    "height": 64,
    "width": 64,
    "num_inference_steps": 12,
    "seed": 3,
}
PLAIN = {"prompt": "a red bicycle", "height": 64, "width": 64, "num_inference_steps": 9, "seed": 4}
OTHER = {**GUIDED, "prompt": "seven brothers", "num_inference_steps": 7, "seed": 6}
# random weights change much from step to step, so thresholds are large
BLOCK = {"step_cache": "first_block", "step_cache_threshold": 1.25}
STRICT = {"step_cache": "first_block", "step_cache_threshold": 1.0}
TAYLOR = {"step_cache": "taylorseer"}
CONFIGS = {
    "first_block": (BLOCK, FirstBlockCacheConfig(threshold=1.25)),
    "strict": (STRICT, FirstBlockCacheConfig(threshold=1.0)),
    "taylorseer": (TAYLOR, TaylorSeerCacheConfig(use_lite_mode=True, taylor_factors_dtype=torch.float32)),
}


@pytest.fixture(scope="module")
def chain(qwen_image_dir: Path) -> Chain:
    return Chain(qwen_image_dir)


@pytest.fixture(scope="module")
def theirs(qwen_image_dir: Path) -> dict[str, list[torch.Tensor]]:
    """The guided image, by cache; `exact`: without one."""
    pipeline = pipeline_of(qwen_image_dir, "QwenImagePipeline")
    made = {"exact": expected(pipeline, GUIDED)}
    for name, (_, config) in CONFIGS.items():
        pipeline.transformer.enable_cache(config)
        made[name] = expected(pipeline, GUIDED)
        pipeline.transformer.disable_cache()
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_as_diffusers(chain: Chain, theirs: dict[str, list[torch.Tensor]], name: str) -> None:
    [made] = chain.run({**GUIDED, **CONFIGS[name][0]})
    assert apart(made, theirs[name]) < WITHIN
    assert apart(made, theirs["exact"]) > WITHIN, "something was left out"


def test_thresholds_matter(theirs: dict[str, list[torch.Tensor]]) -> None:
    assert float((theirs["first_block"][0] - theirs["strict"][0]).abs().max()) > WITHIN


def test_in_a_batch_with_exact_ones(chain: Chain, theirs: dict[str, list[torch.Tensor]]) -> None:
    asked: list[dict[str, Any]] = [
        GUIDED,
        {**GUIDED, **BLOCK},
        {**GUIDED, **STRICT},
        {**GUIDED, **TAYLOR},
        PLAIN,
        {**OTHER, **BLOCK},
        {**OTHER, **TAYLOR},
    ]
    made = chain.run(*asked, late={2: 1, 3: 2, 4: 3, 5: 4, 6: 5})
    for one, name in zip(made, ("exact", *CONFIGS), strict=False):
        assert apart(one, theirs[name]) < WITHIN, name
    for place in (4, 5, 6):
        [alone] = chain.run(asked[place])
        assert apart(made[place], alone.pixels) < WITHIN
    assert max(chain.batches) <= 2
    [again] = chain.run(GUIDED)
    assert apart(again, theirs["exact"]) < WITHIN, "nothing stays behind"


def test_guessed_rows_are_in_no_call(chain: Chain) -> None:
    chain.run({**GUIDED, **TAYLOR})
    assert chain.batches == [2, 2, 2, 0, 2, 0, 0, 0, 0, 2, 0, 0]


def test_one_row_needs_all_blocks_and_another_does_not(chain: Chain) -> None:
    asked = [{**GUIDED, **BLOCK}, {**GUIDED, **BLOCK, "seed": 8}, {**OTHER, **BLOCK}, {**GUIDED, **STRICT, "seed": 9}]
    seen: Counter[str] = Counter()
    blocks = chain.adapters["denoiser"].network.transformer_blocks
    with ExitStack() as stack:
        for name, block in (("first", blocks[0]), ("last", blocks[-1])):
            stack.enter_context(block.register_forward_pre_hook(lambda *_, name=name: seen.update([name])))
        together = chain.run(*asked)
    assert seen["first"] > seen["last"] > 0, "some calls ended at the first block, and were made anew in two parts"
    for case, one in zip(asked, together, strict=True):
        [alone] = chain.run(case)
        assert apart(one, alone.pixels) < WITHIN


SMALL: dict[str, Any] = {"prompt": "a small boat", "height": 64, "width": 64, "num_inference_steps": 9, "seed": 3}
GREY: dict[str, Any] = {**SMALL, "negative_prompt": "grey", "guidance_scale": 4.0}


@pytest.mark.parametrize(
    ("family", "kind", "asked"),
    [("flux", "FluxPipeline", SMALL), ("wan", "WanPipeline", {**GREY, "num_frames": 5})],
)
def test_other_families(family: str, kind: str, asked: dict[str, Any], tmp_path: Path) -> None:
    tiny_preset(family).make(tmp_path, "tiny", 0)
    chain, pipeline = Chain(tmp_path), pipeline_of(tmp_path, kind)
    for more, config in (CONFIGS["first_block"], CONFIGS["taylorseer"]):
        pipeline.transformer.enable_cache(config)
        theirs = expected(pipeline, asked)
        pipeline.transformer.disable_cache()
        [made] = chain.run({**asked, **more})
        assert apart(made, theirs) < WITHIN
        assert apart(chain.run(asked)[0], theirs) > WITHIN


@pytest.mark.parametrize("family", ["sd3", "z-image"])
def test_families_that_have_no_cache_in_diffusers(family: str, tmp_path: Path) -> None:
    """Where nothing is left out, nothing is changed; and something can be left out."""
    tiny_preset(family).make(tmp_path, "tiny", 0)
    chain = Chain(tmp_path)
    [exact] = chain.run(GREY)
    [careful] = chain.run({**GREY, "step_cache": "first_block", "step_cache_threshold": 1e-6})
    assert apart(careful, exact.pixels) < WITHIN
    [careless] = chain.run({**GREY, "step_cache": "first_block", "step_cache_threshold": 1e6})
    assert apart(careless, exact.pixels) > WITHIN


def test_an_unknown_name_is_refused(chain: Chain) -> None:
    with pytest.raises(
        InvalidRequest, match=r"step_cache is 'first_blok'; it must be one of first_block, taylorseer, teacache$"
    ):
        chain.run({**PLAIN, "step_cache": "first_blok"})
    with pytest.raises(InvalidRequest, match=r"step_cache_threshold is 0\.1, but step_cache is 'taylorseer'"):
        chain.run({**PLAIN, "step_cache": "taylorseer", "step_cache_threshold": 0.1})


def test_a_network_without_blocks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Conv2d is not a sequence of transformer blocks; this model has taylor"):
        BlockCache([nn.Conv2d(1, 1, 1)])


# ── TeaCache: diffusers has none, so its rule is written out below for one request at a time ──────────

COEFFICIENTS = {"denoiser": {"teacache_coefficients": [0.5, 0.25, 0.0]}}
TEA = {"step_cache": "teacache", "step_cache_threshold": 0.3}


class Published:
    """The authors' forward for FLUX (`teacache_flux.py` of github.com/ali-vilab/TeaCache), as hooks over a transformer
    that is called for one request: nothing is batched, and a call that is left out computes its blocks all the same."""

    def __init__(self, transformer: Any, coefficients: list[float], threshold: float, steps: int) -> None:
        self.rescale = np.poly1d(coefficients)
        self.threshold, self.steps = threshold, steps
        self.calls = 0
        self.sum = 0.0
        self.before: Any = None
        self.residual: Any = None
        self.left_out: list[int] = []
        first, last = transformer.transformer_blocks[0], transformer.single_transformer_blocks[-1]
        first.register_forward_pre_hook(self.begin, with_kwargs=True)
        last.register_forward_hook(self.end)

    def begin(self, block: Any, args: Any, kwargs: Any) -> None:
        self.hidden = kwargs["hidden_states"]
        modulated = block.norm1(self.hidden, emb=kwargs["temb"])[0]
        if self.calls in (0, self.steps - 1):
            self.due, self.sum = True, 0.0
        else:
            self.sum += self.rescale(float((modulated - self.before).abs().mean() / self.before.abs().mean()))
            self.due = not self.sum < self.threshold
            self.sum = 0.0 if self.due else self.sum
        self.before = modulated

    def end(
        self, block: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text, hidden = output
        if self.due:
            self.residual = hidden - self.hidden
        else:
            self.left_out.append(self.calls)
        self.calls += 1
        return text, self.hidden + self.residual


def test_teacache_is_as_published(tmp_path: Path) -> None:
    tiny_preset("flux").make(tmp_path, "tiny", 0)
    chain, pipeline = Chain(tmp_path, options=COEFFICIENTS), pipeline_of(tmp_path, "FluxPipeline")
    exact = chain.run(SMALL)[0]
    rule = Published(pipeline.transformer, COEFFICIENTS["denoiser"]["teacache_coefficients"], 0.3, 9)
    theirs = expected(pipeline, SMALL)
    assert 2 <= len(rule.left_out) <= 6, "some are left out, and some are not"
    other = {**SMALL, "prompt": "a red bicycle", "num_inference_steps": 6, "seed": 4}
    cases: list[dict[str, Any]] = [{**SMALL, **TEA}, SMALL, {**other, **TEA}, {**other, **TEA, "seed": 5}]
    together = chain.run(*cases, late={1: 1, 2: 2, 3: 3})
    assert apart(together[0], theirs) < WITHIN
    assert apart(together[1], exact.pixels) < WITHIN, "an exact one beside it stays exact"
    assert apart(exact, theirs) > WITHIN
    for case, one in zip(cases[2:], together[2:], strict=True):
        assert apart(one, chain.run(case)[0].pixels) < WITHIN


def test_teacache_where_its_polynomial_is_known(tmp_path: Path) -> None:
    for family, more in (("flux", {}), ("wan", {"num_frames": 5})):
        tiny_preset(family).make(tmp_path / family, "tiny", 0)
        chain = Chain(tmp_path / family)
        asked = {**SMALL, **more, "step_cache": "teacache"}
        if family == "wan":
            with pytest.raises(InvalidRequest, match="it has no published polynomial for this checkpoint"):
                chain.run(asked)
            chain = Chain(tmp_path / family, options=COEFFICIENTS)
        exact = chain.run({**SMALL, **more})[0]
        careful = chain.run({**asked, "step_cache_threshold": 1e-9})[0]
        assert apart(careful, exact.pixels) < WITHIN
        careless = chain.run({**asked, "step_cache_threshold": 1e9})[0]
        assert apart(careless, exact.pixels) > WITHIN


def test_a_polynomial_that_is_none_is_named(qwen_image_dir: Path) -> None:
    with pytest.raises(ConfigError, match="teacache_coefficients is 'flux'; it must be a list of numbers"):
        Chain(qwen_image_dir, options={"denoiser": {"teacache_coefficients": "flux"}})
