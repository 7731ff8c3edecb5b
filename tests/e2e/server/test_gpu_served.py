"""Whole systems on a GPU against the libraries on the same GPU, in float32: `pytest -m gpu`.

One small case of each kind runs on the CPU, too, so that this file is known to work before there is a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from truth_system import System

from segue.messages.deltas import Delta, TextDelta
from segue.messages.sampling import SamplingParams
from segue.models.registry import tiny_preset
from segue.models.shared.library import AutoModelForCausalLM

CUDA = pytest.param(
    "cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
)
# on a CPU test_truth_llm and its like have the same
everywhere = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.nightly), CUDA])
on_gpu = pytest.mark.parametrize("device", [CUDA])
TOKENS = 24
SHARE = 0.04
"""Of a device's memory, for each stage; other tests may run beside these."""
PROMPTS = [[7, 30, 91, 12], list(range(20, 75)), [5] * 9 + [80, 81], list(range(100, 400, 2))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
EXACT: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {"compile": True},
    "attention by torch": {"attention": "torch"},
    "attention by flex": {"attention": "flex", "block_size": 128},
    "n-grams": {"speculation": {"method": "ngram", "tokens": 3}},
    "deterministic": {"deterministic": True},
}
"""Deployments of a language model that change no token."""
ROUGH: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "keys and values in fp8": {"kv_dtype": "fp8"},
}
"""Those that may change some."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("made")}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """The library's convolutions in full float32 too."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def checkpoint(made: dict[str, Path], name: str) -> Path:
    if name not in made:
        made[name] = made[""] / name
        tiny_preset(name).make(made[name], "tiny", 0)
    return made[name]


def library_tokens(directory: Path, device: str) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    model.generation_config.eos_token_id = None
    replies = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0
        )
        replies.append(out[0, len(prompt) :].tolist())
    return replies


def segue_tokens(directory: Path, device: str, keys: Mapping[str, Any] | None = None) -> list[list[int]]:
    system = System(directory, defaults={"devices": [device], "memory_share": SHARE}, stages={"llm": dict(keys or {})})
    try:
        outputs = system.ask(*({"prompt_token_ids": prompt, "sampling": GREEDY} for prompt in PROMPTS))
    finally:
        system.close()
    return [output.token_ids["llm"] for output in outputs]


@everywhere
@pytest.mark.parametrize("kind", ["llama"])
def test_a_language_model(made: dict[str, Path], device: str, kind: str) -> None:
    directory = checkpoint(made, kind)
    assert segue_tokens(directory, device) == library_tokens(directory, device)


@on_gpu
@pytest.mark.parametrize("kind", ["qwen3-moe", "gemma3", "gpt-oss"])
def test_other_language_models(made: dict[str, Path], device: str, kind: str) -> None:
    """Experts, windows, sinks."""
    directory = checkpoint(made, kind)
    assert segue_tokens(directory, device) == library_tokens(directory, device)


@on_gpu
@pytest.mark.parametrize("name", EXACT)
def test_what_changes_no_token(made: dict[str, Path], device: str, name: str) -> None:
    directory = checkpoint(made, "llama")
    assert segue_tokens(directory, device, EXACT[name]) == library_tokens(directory, device)


@on_gpu
@pytest.mark.parametrize("name", ROUGH)
def test_what_rounds(made: dict[str, Path], device: str, name: str) -> None:
    directory = checkpoint(made, "llama")
    ours, theirs = segue_tokens(directory, device, ROUGH[name]), library_tokens(directory, device)
    assert [len(reply) for reply in ours] == [TOKENS] * len(PROMPTS)
    assert sum(mine[0] == yours[0] for mine, yours in zip(ours, theirs, strict=True)) >= len(PROMPTS) // 2


@everywhere
def test_a_killed_worker(made: dict[str, Path], device: str) -> None:
    """The next one finds its device's memory free, and goes on."""
    directory = checkpoint(made, "llama")
    system = System(directory, defaults={"devices": [device], "memory_share": SHARE})
    killed: list[Delta] = []

    def kill(delta: Delta) -> None:
        if isinstance(delta, TextDelta) and not killed:
            killed.append(delta)
            system.kill("llm")

    async def body() -> list[Any]:
        asked = [{"prompt_token_ids": prompt, "sampling": GREEDY} for prompt in PROMPTS]
        return await asyncio.gather(*(system.collect(one, kill) for one in asked))

    try:
        outputs = system.run(body())
    finally:
        system.close()
    assert killed
    assert [output.token_ids["llm"] for output in outputs] == library_tokens(directory, device)


@everywhere
def test_two_workers_of_one_device(made: dict[str, Path], device: str) -> None:
    """They share their weights, also with one that comes after the first has been killed, and captured graphs read them
    there."""
    directory = checkpoint(made, "llama")
    system = System(directory, defaults={"devices": [device], "memory_share": SHARE}, stages={"llm": {"replicas": 2}})
    asked = [{"prompt_token_ids": prompt, "sampling": GREEDY} for prompt in PROMPTS * 4]
    try:
        system.run(system.all_ready())
        outputs = system.ask(*asked)
        shared = system.run(system.stats("llm", "shared_weight_bytes", lambda found: len(found) == 2))
        for replica in (0, 1):
            system.kill_worker(system.pid("llm", replica))
            system.run(system.replaced())
        outputs += system.ask(*asked)
        again = system.run(system.stats("llm", "shared_weight_bytes", lambda found: len(found) == 2))
    finally:
        system.close()
    assert again == shared
    assert shared[0] == shared[1] > 1 << 16
    assert [output.token_ids["llm"] for output in outputs] == library_tokens(directory, device) * 8


IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen-image": ("QwenImagePipeline", {"height": 64, "width": 64, "true_cfg_scale": 3.0}),
    "wan": ("WanPipeline", {"height": 64, "width": 64, "num_frames": 9, "guidance_scale": 4.0}),
}


@everywhere
@pytest.mark.parametrize("stages", [{}, {"denoiser": {"compile": True}}], ids=["recorded", "compiled"])
@pytest.mark.parametrize("name", IMAGES)
def test_images(made: dict[str, Path], device: str, name: str, stages: dict[str, Any]) -> None:
    if device == "cpu" and (stages or name == "wan"):
        pytest.skip("on a CPU other tests have it")
    directory = checkpoint(made, name)
    kind, given = IMAGES[name]
    asked = {"prompt": "a red bicycle", "negative_prompt": "dark", "num_inference_steps": 5, **given}
    system = System(directory, defaults={"devices": [device], "memory_share": SHARE}, stages=stages)
    try:
        output, _ = system.ask({**asked, "seed": 3}, {**asked, "seed": 4})
    finally:
        system.close()
    pipeline = getattr(diffusers, kind).from_pretrained(directory, dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    with torch.inference_mode():
        made_there = pipeline(**asked, generator=torch.Generator().manual_seed(3), output_type="np")[0]
    if name == "wan":
        assert output.videos
        return
    difference = np.abs(np.asarray(output.images[0], np.float32) / 255 - made_there[0]).max()
    assert difference < 1e-2
