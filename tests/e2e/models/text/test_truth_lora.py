"""LoRA adapters through the whole system: many at once, loaded and unloaded while it runs, and after a worker died."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from truth_system import System, library_answers

from lora_files import make_adapter, merge
from segue.messages.deltas import Delta, TextDelta
from segue.messages.errors import InvalidRequest, NotFound
from segue.messages.sampling import SamplingParams
from segue.models.text.causal_lm import tiny

PROMPTS = [[5, 17, 300, 41], list(range(30, 90, 3)), [611, 7]]
TOKENS = 30
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
NAMES = (None, "first", "second")


class Files:
    """A checkpoint, adapters, and what transformers gives with each of them merged."""

    def __init__(self, directory: Path) -> None:
        self.base = directory / "base"
        tiny.make("qwen2", self.base)
        self.paths = {
            name: make_adapter(self.base, directory / name, targets, rank=4, seed=seed)
            for seed, (name, targets) in enumerate(
                {"first": ("q_proj", "v_proj", "up_proj"), "second": ("o_proj", "down_proj")}.items()
            )
        }
        merged = {name: merge(self.base, path, directory / f"{name}-merged") for name, path in self.paths.items()}
        self.expected = {
            name: library_answers(where, PROMPTS, TOKENS, eos_token_id=None)
            for name, where in ({None: self.base} | merged).items()
        }
        assert len({tuple(answers[1]) for answers in self.expected.values()}) == len(NAMES)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("lora"))


@pytest.fixture
def system(files: Files) -> Iterator[System]:
    """`first` is of the deployment; `second` is loaded by a test."""
    stage = {"lora": {"adapters": {"first": str(files.paths["first"])}, "max_adapters": 3, "max_rank": 8}}
    system = System(files.base, stages={"llm": stage})
    yield system
    system.close()


def prompt(place: int, adapter: str | None) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPTS[place], "sampling": GREEDY, "adapter": adapter}


def test_at_run_time(system: System, files: Files) -> None:
    """Several adapters in one batch; a killed worker comes back with those of the deployment and those loaded since,
    and its requests go on with them; an unloaded one is not found any more."""
    omni = system.omni
    with pytest.raises(NotFound, match="no LoRA adapter 'secnd'"):
        system.ask(prompt(0, "secnd"))
    with pytest.raises(InvalidRequest, match=r"adapter_config.json: not there"):
        system.run(omni.load_lora("second", files.base))
    assert list(omni.card.adapters) == ["first"]

    async def while_requests_run() -> list[Any]:
        running = [asyncio.create_task(omni.generate(prompt(place, "first"))) for place in range(len(PROMPTS))]
        await omni.load_lora("second", files.paths["second"])
        return await asyncio.gather(*running)

    for output, expected in zip(system.run(while_requests_run()), files.expected["first"], strict=True):
        assert output.token_ids == {"llm": expected}
    assert omni.card.adapters == {name: str(path) for name, path in files.paths.items()}
    with pytest.raises(InvalidRequest, match="already; unload it first"):
        system.run(omni.load_lora("second", files.paths["second"]))
    check_all(system, files)

    async def through_a_death() -> list[int]:
        killed: list[Delta] = []

        def kill(delta: Delta) -> None:
            if isinstance(delta, TextDelta) and not killed:
                killed.append(delta)
                system.kill("llm")

        outputs = await asyncio.gather(*(system.collect(prompt(1, name), kill) for name in NAMES))
        assert killed
        for output, name in zip(outputs, NAMES, strict=True):
            assert output.token_ids == {"llm": files.expected[name][1]}
        return [output.metrics.attempts for output in outputs]

    assert system.in_time(through_a_death, lambda attempts: min(attempts) > 1) == [2, 2, 2]
    check_all(system, files)

    for name in ("first", "second"):
        system.run(omni.unload_lora(name))
        with pytest.raises(NotFound, match=f"no LoRA adapter '{name}'"):
            system.ask(prompt(0, name))
    with pytest.raises(NotFound, match="no LoRA adapter 'first'"):
        system.run(omni.unload_lora("first"))
    system.kill("llm")
    system.ask(prompt(0, None))  # answered by the worker that comes back
    system.run(omni.load_lora("first", files.paths["second"]))  # a name is free again, also in a worker that came back
    [output] = system.ask(prompt(1, "first"))
    assert output.token_ids == {"llm": files.expected["second"][1]}


def check_all(system: System, files: Files) -> None:
    """Every prompt with every adapter, all at once."""
    asked = [(place, name) for place in range(len(PROMPTS)) for name in NAMES]
    for output, (place, name) in zip(system.ask(*(prompt(*one) for one in asked)), asked, strict=True):
        assert output.token_ids == {"llm": files.expected[name][place]}, (place, name)


def test_every_replica_has_it(files: Files) -> None:
    """Loaded while it runs, in both workers; a request whose adapter was unloaded fails by name where its worker
    dies."""
    system = System(files.base, stages={"llm": {"lora": {}, "replicas": 2}})
    try:
        system.run(system.all_ready())
        system.run(system.omni.load_lora("second", files.paths["second"]))
        for output in system.ask(*(prompt(1, "second") for _ in range(4))):
            assert output.token_ids == {"llm": files.expected["second"][1]}
        unloaded: list[Delta] = []

        async def without_its_adapter() -> Any:
            request = system.omni.request(
                {**prompt(1, "second"), "sampling": SamplingParams(max_tokens=900, ignore_eos=True)}
            )
            async for delta in system.omni.stream(request):
                if isinstance(delta, TextDelta) and not unloaded:
                    unloaded.append(delta)
                    await system.omni.unload_lora("second")
                    busy = [one for one in system.omni.orchestrator.replicas.all if request.request_id in one.requests]
                    [pid] = [one.pid for one in busy if "llm" in one.group]
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)

        with pytest.raises(NotFound, match="no LoRA adapter 'second'"):
            system.run(without_its_adapter())
        assert unloaded
    finally:
        system.close()
