"""A graph of three toys: two take the request, and what they write goes, transformed in the third's worker, to it. Two
of them are at a second place as well: `again` reuses the third, and `after` one that takes the request."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graph_transforms as transforms
import numpy as np
import pytest
from toy_system import answer, collect, kill, pid_of

from segue import ModelGraph
from segue.messages.deltas import Delta, ModelDelta
from segue.messages.errors import InvalidRequest, ShuttingDown, StageFailed
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import RequestOutput


class Graph:
    """It runs on one event loop."""

    def __init__(self, toy_dir: Path) -> None:
        toys = ModelGraph("toys")
        for name in ("left", "right", "last"):
            toys.model(name, toy_dir, main=name == "last")
        toys.reuse("again", "last")
        toys.reuse("after", "left")
        toys.edge("left", "last", transform=transforms.judged, carries="text")
        toys.edge("right", "last", transform=transforms.as_messages, carries="text")
        toys.edge("left", "again", transform=transforms.doubled, carries="text")
        toys.edge("again", "after", carries="text")
        self.loop = asyncio.new_event_loop()
        self.omni = AsyncOmni(toys, config={"defaults": {"threads": 1}})
        self.loop.run_until_complete(self.omni.start())

    def run(self, body: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(body, timeout=300))

    def ask(self, prompt: Any) -> RequestOutput:
        output: RequestOutput = self.run(collect(self.omni, prompt))
        return output


@pytest.fixture(scope="module")
def graph(toy_dir: Path) -> Iterator[Graph]:
    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:  # the workers import the transforms, and what these import
        patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
        graph = Graph(toy_dir)
    yield graph
    graph.run(graph.omni.stop())
    graph.loop.close()


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "modalities": ["text", "left.text", "right.text"], **more}


def written(text: str) -> str:
    """What the last toy is asked: a system message, then what `right` wrote, then what `left` did, backwards."""
    return "<" + answer(text) + answer(text)[::-1]


def test_what_two_models_made_goes_to_a_third(graph: Graph) -> None:
    output = graph.ask(asked("sea"))
    assert output.models["left"].text == output.models["right"].text == answer("sea")
    assert output.text == answer(written("sea")) != answer("sea")
    assert set(output.token_ids) == {"left.counter", "right.counter", "last.counter"}
    assert output.models["left"].finish_reason == "length"
    assert output.metrics.ttft is not None
    assert output.metrics.jct >= output.metrics.ttft
    stages = [stage for stage, *_ in output.metrics.spans]
    assert "last.tone" not in stages, "nobody wants audio"
    assert graph.ask(asked("sea", modalities=["audio"])).audio is not None
    alone = graph.ask(asked("sea", modalities=["left.text"]))
    assert (alone.text, alone.models["left"].text) == ("", answer("sea"))


def test_a_model_at_two_places_answers_like_two_copies(graph: Graph) -> None:
    wanted = ["text", "audio", "again.text", "again.audio", "after.text"]
    output = graph.ask(asked("sea", modalities=wanted, sampling={"again.counter": {"max_tokens": 7}}))
    again = answer(answer("sea"), 7)
    assert output.models["again"].text == again[:7]
    assert output.models["after"].text == answer(again[:7])
    assert output.text == answer(written("sea"))
    assert {name: len(ids) for name, ids in output.token_ids.items()} == {
        "left.counter": 20, "right.counter": 20, "last.counter": 20, "again.counter": 7, "after.counter": 20,
    }  # fmt: skip
    alone = graph.ask(asked("sea"))
    assert alone.token_ids == {name: output.token_ids[name] for name in alone.token_ids}
    heard, said = output.models["again"].audio, output.audio
    assert heard is not None
    assert said is not None
    assert len(heard.samples) != len(said.samples)


def test_a_model_at_two_places_has_its_workers_once(graph: Graph) -> None:
    health = graph.omni.health()
    assert {stage.partition(".")[0] for stage in health.stages} == {"left", "right", "last"}
    assert len({replica.pid for stage in health.stages.values() for replica in stage.replicas}) == 3 * 4


def test_sampling_names_a_place(graph: Graph) -> None:
    with pytest.raises(InvalidRequest, match=r"'again.tone', which does not sample; did you mean 'again.counter'\?"):
        graph.ask(asked("sea", sampling={"again.tone": {}}))
    with pytest.raises(InvalidRequest, match=r"sampling.again.counter.n is 2"):
        graph.ask(asked("sea", modalities=["after.text"], sampling={"again.counter": {"n": 2}}))


def test_the_prompt_of_the_model_that_writes_is_tokenized(graph: Graph) -> None:
    assert graph.run(graph.omni.tokenize("ab")) == [1 + ord("a") % 96, 1 + ord("b") % 96]


def test_each_stage_has_its_own_sampling(graph: Graph) -> None:
    output = graph.ask(asked("sea", sampling={"left.counter": {"max_tokens": 3}}))
    assert output.models["left"].text == answer("sea", 3)[:3]
    assert output.models["right"].text == answer("sea")


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("F", StageFailed, "the transform of what 'left' made, 'judged', raised ValueError: told to fail"),
        ("N", InvalidRequest, "the transform of what 'left' made, 'judged', returned nothing, so there is no input"),
        ("O", StageFailed, "'judged', returned 7; it must return a text, a list of messages, or None"),
    ],
)
def test_what_a_transform_does_wrong_is_named(graph: Graph, text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        graph.ask(asked(text))
    assert not graph.omni.orchestrator.requests
    assert graph.ask(asked("sea")).text == answer(written("sea")), "the worker lives"


@pytest.mark.parametrize(
    "stage", [pytest.param("left.input", marks=pytest.mark.nightly), "left.counter", "last.counter"]
)
def test_killed_at_any_time(graph: Graph, stage: str) -> None:
    async def body() -> None:
        prompt = asked("sea", modalities=["text", "audio", "left.text", "again.text", "after.text"])
        before = await collect(graph.omni, prompt)
        task = asyncio.create_task(collect(graph.omni, prompt))
        await asyncio.sleep(0)
        await kill(pid_of(graph.omni.health(), stage))
        output = await task
        assert output.text == before.text == answer(written("sea"))
        assert output.token_ids == before.token_ids
        assert output.models["again"].text == before.models["again"].text == answer(answer("sea"))
        assert output.models["after"].text == before.models["after"].text
        assert output.audio is not None
        assert before.audio is not None
        np.testing.assert_array_equal(output.audio.samples, before.audio.samples)

    graph.run(body())


def test_health_and_metrics_tell_the_models_apart(graph: Graph) -> None:
    assert {"left.counter", "right.counter", "last.tone"} <= set(graph.omni.health().stages)
    assert b'stage="last.counter"' in graph.omni.metrics()


def test_a_stop_lets_a_request_go_on_from_model_to_model(graph: Graph) -> None:
    """The last test: nothing is admitted after it."""
    finishing: list[asyncio.Task[None]] = []

    def seen(delta: Delta) -> None:
        if isinstance(delta, ModelDelta) and not finishing:
            finishing.append(asyncio.get_running_loop().create_task(graph.omni.finish()))

    async def body() -> None:
        output = await collect(graph.omni, asked("sea", modalities=["text", "left.text"]), seen)
        assert output.text == answer(written("sea"))
        await finishing[0]
        with pytest.raises(ShuttingDown):
            await collect(graph.omni, asked("sea"))

    graph.run(body())
