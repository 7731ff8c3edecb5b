"""A stage of two processes through the whole system: the same tokens, whichever of them is killed, and nobody left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from truth_system import System, library_answers

from segue.messages.deltas import Delta, TextDelta
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.models.text.causal_lm import tiny
from segue.orchestrator.omni.outputs import RequestOutput

TOKENS = 40
PROMPTS = [[index * 7919 % 640 for index in range(first, first + length)] for first, length in ((3, 20), (50, 70))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny.make("llama", directory)
    return directory


@pytest.fixture(scope="module")
def running(directory: Path) -> Iterator[System]:
    system = System(directory, stages={"llm": {"tensor_parallel": 2}})
    yield system
    system.close()


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    return library_answers(directory, PROMPTS, TOKENS, min_new_tokens=TOKENS)


def greedy(prompt: list[int]) -> dict[str, object]:
    return {
        "prompt_token_ids": prompt,
        "sampling": SamplingParams(temperature=0.0, max_tokens=TOKENS, min_tokens=TOKENS),
    }


def test_the_same_tokens(running: System, expected: list[list[int]]) -> None:
    outputs = running.ask(*map(greedy, PROMPTS))
    assert [output.token_ids["llm"] for output in outputs] == expected


def test_nobody_listens_but_on_the_loopback_interface(running: System) -> None:
    for process in (psutil.Process(running.pid("llm")), running.follower("llm")):
        listening = [one for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
        assert {one.laddr.ip for one in listening} <= {"127.0.0.1"}


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_killed_at_work(running: System, expected: list[list[int]], who: str) -> None:
    async def body() -> RequestOutput:
        leader, second = psutil.Process(running.pid("llm")), running.follower("llm")
        killed: list[Delta] = []

        def kill(delta: Delta) -> None:
            if isinstance(delta, TextDelta) and not killed:
                killed.append(delta)
                running.kill_worker(leader.pid, leader.pid if who == "leader" else second.pid)

        output = await running.collect(greedy(PROMPTS[0]), kill)
        assert killed
        assert output.token_ids["llm"] == expected[0]
        _, alive = await asyncio.to_thread(psutil.wait_procs, [leader, second], timeout=120)
        assert not alive, "neither outlives the other"
        return output

    assert running.in_time(body, lambda output: output.metrics.attempts > 1).metrics.attempts == 2
    assert running.follower("llm").is_running()


def test_nobody_is_left(directory: Path, expected: list[list[int]]) -> None:
    """Two ranks of a second system, which guess tokens ahead, stopped while they have nothing to do."""
    speculation = {"method": "draft", "model": str(directory), "tokens": 3}
    system = System(directory, stages={"llm": {"tensor_parallel": 2, "speculation": speculation}})
    [output] = system.ask(greedy(PROMPTS[1]))
    processes = [psutil.Process(system.pid("llm")), system.follower("llm")]
    system.close()
    assert output.token_ids["llm"] == expected[1]
    assert not any(process.is_running() for process in processes)


@pytest.mark.parametrize(
    ("ranks", "kind", "named"),
    [
        pytest.param(2, "gpt2", "GPT2LMHeadModel cannot be run tensor parallel", marks=pytest.mark.nightly),
        pytest.param(3, "llama", "num_attention_heads is 4", marks=pytest.mark.nightly),
    ],
)
def test_what_cannot_be_divided_does_not_start(ranks: int, kind: str, named: str, tmp_path: Path) -> None:
    tiny.make(kind, tmp_path)
    with pytest.raises(ConfigError, match=named):
        System(tmp_path, stages={"llm": {"tensor_parallel": ranks}})
