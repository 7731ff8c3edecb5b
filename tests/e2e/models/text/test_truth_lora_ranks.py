"""LoRA adapters of a stage of two processes, through the whole system: loaded while it runs, on both, and after one of
the two was killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from truth_system import System, library_answers

from lora_files import make_adapter, merge
from segue.messages.deltas import Delta, TextDelta
from segue.messages.sampling import SamplingParams
from segue.models.text.causal_lm import tiny

PROMPT = [index * 7919 % 640 for index in range(3, 40)]
TOKENS = 30
NAMES = (None, "first", "second")


class Files:
    """A checkpoint, adapters, and what transformers gives with each of them merged."""

    def __init__(self, directory: Path) -> None:
        self.base = directory / "base"
        tiny.make("llama", self.base)
        targets = {"first": ("q_proj", "down_proj"), "second": ("o_proj", "up_proj")}
        self.paths = {
            name: make_adapter(self.base, directory / name, layers, rank=4, seed=seed)
            for seed, (name, layers) in enumerate(targets.items())
        }
        merged = {name: merge(self.base, path, directory / f"{name}-merged") for name, path in self.paths.items()}
        self.expected = {
            name: library_answers(where, [PROMPT], TOKENS, eos_token_id=None)[0]
            for name, where in ({None: self.base} | merged).items()
        }
        assert len({tuple(answer) for answer in self.expected.values()}) == len(NAMES)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def system(files: Files) -> Iterator[System]:
    lora = {"adapters": {"first": str(files.paths["first"])}, "max_adapters": 3, "max_rank": 8}
    system = System(files.base, stages={"llm": {"tensor_parallel": 2, "lora": lora}})
    yield system
    system.close()


def prompt(adapter: str | None) -> dict[str, Any]:
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return {"prompt_token_ids": PROMPT, "sampling": sampling, "adapter": adapter}


@pytest.mark.nightly
def test_loaded_on_both_and_there_again_after_one_was_killed(system: System, files: Files) -> None:
    system.run(system.omni.load_lora("second", files.paths["second"]))

    async def all_at_once() -> list[int]:
        leader, follower = system.pid("llm"), system.follower("llm")
        killed: list[Delta] = []

        def kill(delta: Delta) -> None:
            if isinstance(delta, TextDelta) and not killed:
                killed.append(delta)
                system.kill_worker(leader, follower.pid)

        outputs = await asyncio.gather(*(system.collect(prompt(name), kill) for name in NAMES))
        assert killed
        for output, name in zip(outputs, NAMES, strict=True):
            assert output.token_ids == {"llm": files.expected[name]}
        return [output.metrics.attempts for output in outputs]

    assert system.in_time(all_at_once, lambda attempts: min(attempts) > 1) == [2, 2, 2]
    system.run(system.omni.unload_lora("second"))
    for output, name in zip(system.ask(prompt(None), prompt("first")), NAMES[:2], strict=True):
        assert output.token_ids == {"llm": files.expected[name]}
