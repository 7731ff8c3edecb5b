"""Loops over models: a judge that has a draft revised, and a writer that goes on with what it wrote."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graph_transforms as transforms
import numpy as np
import pytest
from toy_system import Gate, answer, collect, kill, pid_of

from segue import ModelGraph
from segue.graph.parts import Outcome
from segue.messages.deltas import Delta, ModelDelta
from segue.messages.errors import InvalidRequest, SegueError, StageFailed
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import RequestOutput

PROMPTS = ("one", "web", "two", "a tale", "cart", "x", "ten", "day")


class Loop:
    """A running graph on an event loop of its own."""

    def __init__(self, graph: ModelGraph) -> None:
        self._loop = asyncio.new_event_loop()
        self.omni = AsyncOmni(graph, config={"defaults": {"threads": 1}})
        self._loop.run_until_complete(self.omni.start())

    def run(self, body: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(body, timeout=300))

    def ask(self, *prompts: Any) -> list[RequestOutput]:
        async def body() -> list[RequestOutput]:
            return await asyncio.gather(*(collect(self.omni, prompt) for prompt in prompts))

        outputs: list[RequestOutput] = self.run(body())
        return outputs

    def close(self) -> None:
        self.run(self.omni.stop())
        self._loop.close()


@pytest.fixture(scope="module")
def judged(toy_dir: Path) -> Iterator[Loop]:
    """write → judge ⇢ write, at most twice; what `echo` gets is the last draft."""
    graph = ModelGraph("judged")
    graph.model("write", toy_dir, main=True)
    graph.reuse("judge", "write")
    graph.reuse("echo", "write")
    graph.edge("write", "judge", carries="text")
    graph.edge("write", "echo", carries="text")
    graph.edge("judge", "write", carries="text", transform=transforms.remarks, on=transforms.unsettled, most=2,
               revises=True)  # fmt: skip
    yield from running(graph)


@pytest.fixture(scope="module")
def going_on(toy_dir: Path) -> Iterator[Loop]:
    """A writer that is asked to go on, three times."""
    graph = ModelGraph("going_on")
    graph.model("write", toy_dir)
    graph.edge("write", "write", carries="text", transform=transforms.remarks, most=3)
    yield from running(graph)


def running(graph: ModelGraph) -> Iterator[Loop]:
    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:  # the workers import the transforms, and what these import
        patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
        loop = Loop(graph)
    yield loop
    loop.close()


def asked(text: str, *modalities: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "modalities": list(modalities or ["text"]), **more}


def drafts(text: str, most: int = 2) -> tuple[list[str], bool, int]:
    """(what is written in each visit, whether the bound ended it, letters of the last visit's conversation)"""
    conversation, written = text, []
    for visit in range(most + 1):
        written.append(answer(conversation))
        judgement = answer(written[-1])
        if visit == most or not transforms.unsettled(
            Request(request_id=""), Outcome(visit, token_ids=ids(judgement), text=judgement)
        ):
            return written, visit == most, len(conversation)
        conversation += written[-1] + "!" + judgement
    raise AssertionError


def ids(text: str) -> tuple[int, ...]:
    return tuple((ord(letter) - ord("a")) or 26 for letter in text)


def assert_judged(output: RequestOutput, text: str) -> None:
    written, bound, length = drafts(text)
    assert output.text == written[-1]
    assert output.usage.prompt_tokens == length, "the whole conversation"
    assert (output.outputs[0].stop_reason == "the bound of edge judge -> write") is bound
    named = {f"write@{visit}" if visit else "write": draft for visit, draft in enumerate(written)}
    if "echo" in output.models:
        assert output.models["echo"].text == answer(written[-1])
        assert {name: one.text for name, one in output.models.items() if name.startswith("write")} == named
        judges = [name for name in output.models if name.startswith("judge")]
        assert len(judges) == len(written), "it is wanted, so it is asked once more"


def test_the_last_draft_is_the_answer(judged: Loop) -> None:
    prompts = [asked(text, "text", "write.text", "judge.text", "echo.text") for text in PROMPTS]
    for text, output in zip(PROMPTS, judged.ask(*prompts), strict=True):
        assert_judged(output, text)
    lengths = {(len(drafts(text)[0]), drafts(text)[1]) for text in PROMPTS}
    assert {1, 2, 3} <= {length for length, _ in lengths}
    assert {True, False} <= {bound for length, bound in lengths}


def test_no_draft_but_the_last_reaches_the_client(judged: Loop) -> None:
    """The last one that the bound allows is sent while it is written; the judge is not asked about it."""
    seen: list[Delta] = []
    [text] = [text for text in PROMPTS if drafts(text)[1]][:1]
    output = judged.run(collect(judged.omni, asked(text, "text", "audio"), seen.append))
    assert_judged(output, text)
    assert not any(isinstance(delta, ModelDelta) for delta in seen)
    stages = [stage for stage, phase, *_ in output.metrics.spans if phase == "run"]
    assert stages.count("write.counter") == 3
    assert stages.count("judge.counter") == 2
    assert not [stage for stage in stages if stage.startswith("echo")]


@pytest.mark.nightly  # test_truth_graph_loop
def test_a_model_goes_on_with_what_it_wrote(going_on: Loop) -> None:
    for text, output in zip(PROMPTS, going_on.ask(*(asked(text, "text", "audio") for text in PROMPTS)), strict=True):
        conversation, written = text, ""
        for _ in range(4):
            said = answer(conversation)
            written, conversation = written + said, conversation + said + "!" + said
        assert output.text == written
        assert len(output.outputs[0].token_ids) == len(output.token_ids["write.counter"]) >= len(written)
        assert output.finish_reason != "length" or output.outputs[0].stop_reason is None, "no bound cut it off"
        alone = [going_on.ask(asked(text, "audio", seed=3))[0].audio for _ in range(2)]
        assert alone[0] is not None
        assert alone[1] is not None
        np.testing.assert_array_equal(alone[0].samples, alone[1].samples)


@pytest.mark.parametrize("stage", ["write.counter", "write.input"])
def test_killed_between_visits(judged: Loop, stage: str) -> None:
    """kill -9 as soon as the judge has said something."""

    async def body() -> None:
        for text in PROMPTS[:4]:
            killing: list[asyncio.Task[None]] = []

            def seen(delta: Delta, killing: list[asyncio.Task[None]] = killing) -> None:
                if isinstance(delta, ModelDelta) and delta.model == "judge" and not killing:
                    killing.append(asyncio.create_task(kill(pid_of(judged.omni.health(), stage))))

            prompt = asked(text, "text", "write.text", "judge.text", "echo.text")
            assert_judged(await collect(judged.omni, prompt, seen), text)
            await killing[0]

    judged.run(body())


def test_a_client_that_leaves_in_a_later_visit(judged: Loop) -> None:
    [text] = [text for text in PROMPTS if len(drafts(text)[0]) > 1][:1]

    async def body() -> None:
        reached = asyncio.Event()

        def seen(delta: Delta) -> None:
            if isinstance(delta, ModelDelta) and delta.model == "write@1":
                reached.set()

        asking = asyncio.create_task(collect(judged.omni, asked(text, "text", "write.text"), seen))
        await reached.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not judged.omni.orchestrator.requests

    judged.run(body())
    [output] = judged.ask(asked(text))
    assert_judged(output, text)


def test_a_gate_holds_a_visit_that_is_killed(judged: Loop, tmp_path: Path) -> None:
    """kill -9 inside a visit: it goes on where it was."""

    async def body() -> None:
        gate = Gate(tmp_path)
        prompt = asked("a tale", "text", "audio", options={"hold": gate.option("counter", 7)})
        asking = asyncio.create_task(collect(judged.omni, prompt))
        held = await gate.reached()
        gate.remove()
        await kill(pid_of(judged.omni.health(), "write.counter"), held)
        output = await asking
        assert_judged(output, "a tale")
        assert output.metrics.attempts > 1

    judged.run(body())


def test_what_a_loop_refuses(judged: Loop) -> None:
    with pytest.raises(StageFailed, match="'unsettled' of edge 'judge' -> 'write' raised LookupError: told to break"):
        judged.ask(asked("sea", options={"fail_at": "condition"}))
    with pytest.raises(InvalidRequest, match=r"returns to 'write' with a text: send messages or a prompt"):
        judged.ask({"prompt_token_ids": [1, 2], "modalities": ["text"]})
    for place in ("write", "echo"):
        with pytest.raises(InvalidRequest) as refused:
            judged.ask(asked("sea", "text", "echo.text", sampling={f"{place}.counter": SamplingParams(n=2)}))
        assert refused.value.field == f"sampling.{place}.counter.n"
    with pytest.raises(SegueError, match="told to fail at 3"):
        judged.ask(asked("sea", "audio", options={"fail_at": {"stage": "tone", "at": 3}}))
    assert not judged.omni.orchestrator.requests
