"""The whole system on the toy family: real processes, real sockets, real kills; no model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from segue.messages.deltas import AudioDelta, Delta, Finished, TextDelta, TokensDelta
from segue.messages.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    StageFailed,
    StageLost,
)
from segue.messages.sampling import SamplingParams, StructuredOutput
from segue.orchestrator.omni import AsyncOmni, Omni
from segue.orchestrator.outputs import Collector, RequestOutput
from segue.orchestrator.service import Health

pytestmark = pytest.mark.usefixtures("toy_path")


def expected_ids(text: str, count: int = 20) -> list[int]:
    from segue_toy.stages import VOCAB, next_token

    token, ids = 1 + ord(text[-1]) % (VOCAB - 1), []
    while len(ids) < count and (not ids or ids[-1] != 0 or count > 20):
        token = next_token(token)
        ids.append(token)
    return ids


def assert_right(output: RequestOutput, text: str, count: int = 20) -> None:
    """Text, ids and samples are what the toy's arithmetic says, none lost, none twice."""
    from segue_toy.stages import SAMPLES_PER_TOKEN, VOCAB, text_of

    ids = expected_ids(text, count)
    assert output.token_ids == {"counter": ids}
    assert output.text == text_of([token for token in ids if token])
    if output.audio is not None:
        prompt = [1 + ord(letter) % (VOCAB - 1) for letter in text]
        values = np.array([*prompt, *ids[:-1]], dtype=np.float32) / VOCAB  # the last token is never forwarded
        np.testing.assert_allclose(output.audio.samples, np.repeat(values, SAMPLES_PER_TOKEN), rtol=1e-6)


class System:
    """Running toys on one event loop. Starting one costs seconds (its workers import torch): most tests share one."""

    def __init__(self, toy_dir: Path) -> None:
        self._toy_dir = toy_dir
        self._loop = asyncio.new_event_loop()
        self._shared: AsyncOmni | None = None

    def run(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop.run_until_complete(asyncio.wait_for(body(), timeout=60))

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[AsyncOmni]:
        if self._shared is None:
            self._shared = AsyncOmni(self._toy_dir)
            await self._shared.start()
        yield self._shared
        assert not self._shared.orchestrator.requests

    @asynccontextmanager
    async def own(self, **config: Any) -> AsyncIterator[AsyncOmni]:
        async with AsyncOmni(self._toy_dir, config=config) as omni:
            yield omni

    def close(self) -> None:
        if self._shared is not None:
            self._loop.run_until_complete(self._shared.stop())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


@pytest.fixture(scope="module")
def system(toy_dir: Path) -> Iterator[System]:
    system = System(toy_dir)
    yield system
    system.close()


async def kill(pid: int) -> None:
    """kill -9, and wait until it is gone."""
    process = psutil.Process(pid)
    process.kill()
    await asyncio.to_thread(process.wait)


def both(text: str, **options: Any) -> dict[str, Any]:
    message = {"messages": [{"role": "user", "content": text}], "modalities": ["text", "audio"]}
    return {**message, "options": options} if options else message


async def collect(
    omni: AsyncOmni, prompt: Any, on_delta: Callable[[Delta], None] = lambda delta: None
) -> RequestOutput:
    request = omni.request(prompt)
    collector = Collector(request.request_id, wants_audio="audio" in request.modalities)
    async for delta in omni.stream(request):
        on_delta(delta)
        collector.add(delta)
    return collector.output()


def pid_of(health: Health, stage: str) -> int:
    [replica] = health.stages[stage].replicas
    assert replica.pid is not None
    return replica.pid


class Gate:
    """Holds a stage at a known point: `reached` returns when it is there; `open` lets it go on."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "gate")
        os.mkfifo(self.path)

    def option(self, stage: str, at: int) -> dict[str, Any]:
        return {"stage": stage, "at": at, "fifo": self.path}

    async def reached(self) -> int:
        return await asyncio.to_thread(os.open, self.path, os.O_WRONLY)

    def remove(self) -> None:
        os.unlink(self.path)


def test_text_and_audio_of_many_requests_are_right(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            texts = [f"hello {number}" for number in range(24)]
            outputs = await asyncio.gather(*(omni.generate(both(text)) for text in texts))
            for text, output in zip(texts, outputs, strict=True):
                assert_right(output, text)
                assert output.audio is not None
            one = outputs[0]
            assert one.usage.prompt_tokens == len("hello 0")
            assert one.usage.completion_modalities == {"text": len(one.token_ids["counter"])}
            assert one.metrics.jct >= (one.metrics.ttfa or 0) > 0
            assert {span[0] for span in one.metrics.spans} == {"input", "counter", "tone"}

    system.run(body)


def test_text_only_never_touches_the_audio_stage(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            output = await omni.generate("only text")
            assert_right(output, "only text")
            assert output.audio is None
            assert {span[0] for span in output.metrics.spans} == {"input", "counter"}

    system.run(body)


def test_tokens_need_the_input_stage_only(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            assert await omni.tokenize("hello") == [1 + ord(letter) % 96 for letter in "hello"]
            asked = omni.request("hello", modalities=["tokens"])
            deltas = [delta async for delta in omni.stream(asked)]
            [tokens, end] = deltas
            assert tokens == TokensDelta("input", [9, 6, 13, 13, 16], ["9", "6", "13", "13", "16"], "hello")
            assert isinstance(end, Finished)
            assert (end.finish_reason, end.token_ids) == ("stop", {})
            # beside text they come first, and the stages below see nothing of them
            both = [delta async for delta in omni.stream(omni.request("hello", modalities=["tokens", "text"]))]
            assert [type(delta).__name__ for delta in both[:2]] == ["TokensDelta", "TextDelta"]

    system.run(body)


def test_deltas_stream_while_stages_run(system: System, tmp_path: Path) -> None:
    """Sound arrives while the counter is still held at its tenth token."""

    async def body() -> None:
        gate = Gate(tmp_path)
        seen: list[Delta] = []
        heard = asyncio.Event()

        def note(delta: Delta) -> None:
            seen.append(delta)
            if isinstance(delta, AudioDelta):
                heard.set()

        async with system.shared() as omni:
            task = asyncio.create_task(collect(omni, both("stream me", hold=gate.option("counter", 10)), note))
            held = await gate.reached()
            await heard.wait()
            assert not any(isinstance(delta, Finished) for delta in seen)
            assert any(isinstance(delta, TextDelta) for delta in seen)
            os.close(held)
            assert_right(await task, "stream me")

    system.run(body)


@pytest.mark.parametrize(("stage", "at"), [("counter", 7), ("tone", 0), ("tone", 12)])
def test_a_killed_worker_comes_back_and_requests_finish(system: System, tmp_path: Path, stage: str, at: int) -> None:
    """kill -9 in the middle of the stage: same text, same samples, nothing twice; other requests go on."""

    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.shared() as omni:
            bystander = both("bystander")
            task = asyncio.create_task(collect(omni, both("kill me", hold=gate.option(stage, at))))
            held = await gate.reached()
            other = asyncio.create_task(omni.generate(bystander))
            pid = pid_of(omni.health(), stage)
            restarts = omni.health().stages[stage].replicas[0].restarts
            await kill(pid)
            gate.remove()
            os.close(held)
            output = await task
            assert_right(output, "kill me")
            assert output.metrics.attempts == 2
            assert_right(await other, "bystander")
            health = omni.health()
            assert health.ready
            assert pid_of(health, stage) != pid
            assert health.stages[stage].replicas[0].restarts == restarts + 1

    system.run(body)


def test_a_killed_input_worker_comes_back(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            await kill(pid_of(omni.health(), "input"))
            assert_right(await omni.generate(both("after the input died")), "after the input died")

    system.run(body)


def test_a_killed_fork_server_is_replaced(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            server = psutil.Process(pid_of(omni.health(), "input")).parent()
            assert server is not None
            await kill(server.pid)
            assert_right(await omni.generate(both("all gone")), "all gone")

    system.run(body)


def test_retries_are_bounded_and_the_error_names_the_stage(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.own(limits={"max_retries": 1}) as omni:
            task = asyncio.create_task(collect(omni, both("doomed", hold=gate.option("tone", 3))))
            for _ in range(2):
                held = await gate.reached()
                await kill(pid_of(omni.health(), "tone"))
                os.close(held)
            with pytest.raises(StageLost, match="'tone'") as caught:
                await task
            assert caught.value.stage == "tone"
            gate.remove()
            assert_right(await omni.generate(both("next")), "next")

    system.run(body)


def test_a_sibling_takes_over(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.own(stages={"tone": {"replicas": 2}}) as omni:
            before = {replica.pid for replica in omni.health().stages["tone"].replicas}
            assert len(before) == 2
            task = asyncio.create_task(collect(omni, both("twins", hold=gate.option("tone", 5))))
            held = await gate.reached()
            busy = next(r for r in omni.orchestrator.replicas.all if r.group == ("tone",) and r.requests)
            assert busy.pid is not None
            await kill(busy.pid)
            gate.remove()
            os.close(held)
            assert_right(await task, "twins")

    system.run(body)


def test_a_stage_that_raises_fails_its_request_alone(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            for stage in ("counter", "tone"):
                good, bad = await asyncio.gather(
                    omni.generate(both("fine")),
                    omni.generate(both("bad", fail_at={"stage": stage, "at": 4})),
                    return_exceptions=True,
                )
                assert isinstance(bad, StageFailed)
                assert bad.stage == stage
                assert "told to fail at 4" in bad.message
                assert isinstance(good, RequestOutput)
                assert_right(good, "fine")

    system.run(body)


def test_what_the_input_stage_refuses_names_the_field(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            with pytest.raises(InvalidRequest, match="forbidden") as caught:
                await omni.generate("forbidden")
            assert caught.value.field == "messages[0].content"

    system.run(body)


def test_cancelling_reaches_every_stage(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.shared() as omni:
            task = asyncio.create_task(collect(omni, both("cancel me", hold=gate.option("tone", 2))))
            held = await gate.reached()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            os.close(held)
            gate.remove()
            # a second request through the same workers, then their books must be empty
            assert_right(await omni.generate(both("after")), "after")
            assert not omni.orchestrator.requests
            stats = await idle_stats(omni)
            assert stats["counter"]["blocks_used"] == 0
            assert stats["counter"]["running"] == stats["counter"]["waiting"] == 0
            assert stats["tone"]["running"] == stats["tone"]["waiting"] == 0

    system.run(body)


async def idle_stats(omni: AsyncOmni) -> dict[str, dict[str, float]]:
    """The newest stats of every stage, once all workers have reported that they are idle."""
    while True:
        reports = [stage for stats in omni.orchestrator.stats.values() for stage in stats.stages]
        stages: dict[str, Any] = {report.stage: report.values for report in reports}
        if len(stages) == 3 and all(not values["running"] and not values["waiting"] for values in stages.values()):
            return stages
        await omni.generate("tick")  # makes every worker on its way report again


def test_a_deadline_ends_the_request(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        import time

        gate = Gate(tmp_path)
        async with system.shared() as omni:
            prompt = {**both("late", hold=gate.option("tone", 2)), "deadline": time.time() + 0.5}
            task = asyncio.create_task(collect(omni, prompt))
            held = await gate.reached()
            with pytest.raises(DeadlineExceeded):
                await task
            os.close(held)
            gate.remove()
            assert_right(await omni.generate("in time"), "in time")

    system.run(body)


def test_the_queue_is_bounded(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.own(limits={"max_waiting": 1}) as omni:
            task = asyncio.create_task(collect(omni, both("first", hold=gate.option("tone", 2))))
            held = await gate.reached()
            with pytest.raises(Overloaded, match="max_waiting"):
                await omni.generate("second")
            gate.remove()
            os.close(held)
            assert_right(await task, "first")
            assert_right(await omni.generate("third"), "third")

    system.run(body)


def test_bad_requests_are_refused_at_the_door(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            with pytest.raises(InvalidRequest, match="modalities"):
                await omni.generate({**both("x"), "modalities": ["smell"]})
            with pytest.raises(NotFound, match="did you mean 'one'"):
                await omni.generate({**both("x"), "voice": "onee"})
            with pytest.raises(InvalidRequest, match="did you mean 'counter'"):
                await omni.generate({**both("x"), "sampling": {"countr": {"temperature": 0}}})
            with pytest.raises(InvalidRequest, match="did you mean 'hold'"):
                await omni.generate(both("x", hld=1))
            with pytest.raises(InvalidRequest, match="did you mean 'messages'"):
                await omni.generate({"mesages": []})
            with pytest.raises(InvalidRequest, match="the prompt is 5; it must be an object"):
                await omni.generate(5)  # type: ignore[arg-type]

    system.run(body)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"seed": "one"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**70}, None),
        ({"priority": "high"}, "priority"),
        ({"deadline": "soon"}, "deadline"),
        ({"voice": 5}, "voice"),
        ({"modalities": "text"}, "modalities"),
        ({"modalities": [5]}, "modalities[0]"),
        ({"options": [1]}, "options"),
        ({"options": {"hold": object()}}, None),
        ({"sampling": "hot"}, "sampling"),
        ({"sampling": {"counter": 5}}, "sampling.counter"),
        ({"sampling": {"counter": {"temperature": "hot"}}}, "sampling.counter.temperature"),
        ({"sampling": SamplingParams(max_tokens=1.5)}, "sampling.counter.max_tokens"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(stop="end")}, "sampling.counter.stop"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(seed=2**70)}, "sampling.counter.seed"),
        ({"sampling": SamplingParams(temperature=np.float32(1))}, "sampling.counter"),  # type: ignore[arg-type]
        ({"prompt_token_ids": "abc"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({"prompt_token_ids": 5}, "prompt_token_ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_wrong_types_are_refused_and_reach_no_worker(system: System, wrong: dict[str, Any], field: str | None) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            before = [pid_of(omni.health(), stage) for stage in omni.card.stages]
            prompt = {**both("typed"), **wrong}
            if "prompt_token_ids" in wrong:
                del prompt["messages"]
            with pytest.raises(InvalidRequest) as caught:
                await omni.generate(prompt)
            assert caught.value.field == field
            assert_right(await omni.generate(both("next")), "next")
            assert [pid_of(omni.health(), stage) for stage in omni.card.stages] == before

    system.run(body)


def test_a_small_edge_budget_never_deadlocks(system: System) -> None:
    """One byte of budget and the smallest pools: every chunk waits for the one before it, and all is well."""

    async def body() -> None:
        config = {
            "edges": [{"from": "counter", "to": "tone", "budget": 1}],
            "stages": {"counter": {"kv_blocks": 6, "block_size": 4, "max_batch": 2, "max_tokens_per_step": 4}},
        }
        async with system.own(**config) as omni:
            texts = [f"t{number}" for number in range(8)]
            outputs = await asyncio.gather(*(omni.generate(both(text)) for text in texts))
            for text, output in zip(texts, outputs, strict=True):
                assert_right(output, text)

    system.run(body)


def test_a_full_edge_stops_its_upstream(system: System, tmp_path: Path) -> None:
    """While the tone is held, the counter stops where the edge's budget ends, and goes on when it is let go."""

    async def body() -> None:
        gate = Gate(tmp_path)
        config = {"edges": [{"from": "counter", "to": "tone", "budget": 2000}]}
        async with system.own(**config) as omni:
            seen: list[str] = []

            def note(delta: Delta) -> None:
                if isinstance(delta, TextDelta):
                    seen.append(delta.text)

            long = {**both("budget", hold=gate.option("tone", 6)), "sampling": {"counter": {"max_tokens": 400}}}
            long["sampling"]["counter"]["ignore_eos"] = True
            task = asyncio.create_task(collect(omni, long, note))
            held = await gate.reached()
            await omni.generate("the counter is free to serve others")
            others = await asyncio.gather(*(omni.generate(f"text {number}") for number in range(4)))
            assert len(others) == 4
            assert len("".join(seen)) < 100, "the counter ran on although nobody took what it made"
            gate.remove()
            os.close(held)
            assert_right(await task, "budget", 400)

    system.run(body)


def test_retained_payloads_over_the_limit_come_back_from_the_file(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.own(limits={"retained_bytes": 64}) as omni:
            task = asyncio.create_task(collect(omni, both("spill me", hold=gate.option("tone", 12))))
            held = await gate.reached()
            await kill(pid_of(omni.health(), "tone"))
            gate.remove()
            os.close(held)
            assert_right(await task, "spill me")

    system.run(body)


def test_a_broken_start_is_the_workers_own_error(system: System, toy_dir: Path) -> None:
    async def body() -> None:
        omni = AsyncOmni(toy_dir, config={"stages": {"counter": {"options": {"broken": True}}}})
        with pytest.raises(
            ConfigError, match=r"worker 'counter.0-1' could not start: RuntimeError: the weights are gone"
        ):
            await omni.start()
        assert not os.path.exists(omni.orchestrator.runtime_dir)

    system.run(body)


def test_stopping_leaves_nothing_behind(system: System) -> None:
    async def body() -> None:
        before = set(os.listdir("/dev/shm"))
        async with system.own() as omni:
            assert_right(await omni.generate(both("x")), "x")
            workers = [psutil.Process(pid_of(omni.health(), stage)) for stage in ("input", "counter", "tone")]
            [server] = {worker.parent() for worker in workers}
            assert server is not None
            directory = omni.orchestrator.runtime_dir
            assert os.path.isdir(directory)
        assert not os.path.exists(directory)
        assert not [process for process in [server, *workers] if process.is_running()]
        assert set(os.listdir("/dev/shm")) <= before

    system.run(body)


def test_omni_from_a_plain_script(toy_dir: Path) -> None:
    with Omni(toy_dir, progress=False) as omni:
        [one, two] = omni.generate([both("a script"), "another"], seed=3)
    assert_right(one, "a script")
    assert_right(two, "another")


@pytest.mark.parametrize("at", [0, 6])
def test_what_is_told_of_tokens_is_told_once_though_a_worker_dies(system: System, tmp_path: Path, at: int) -> None:
    sampling = SamplingParams(max_tokens=12, logprobs=2, prompt_logprobs=1)

    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.shared() as omni:
            hold = {"hold": gate.option("counter", at)}
            prompt = {**both("hello"), "options": hold, "sampling": sampling, "return_prompt_ids": True}
            asking = asyncio.create_task(omni.generate(prompt))
            held = await gate.reached()
            await kill(pid_of(omni.health(), "counter"))
            gate.remove()
            os.close(held)
            output = await asking
        assert_right(output, "hello", 12)
        assert output.metrics.attempts == 2
        assert [one.chosen.token_id for one in output.logprobs] == output.token_ids["counter"]
        assert all(one.chosen.rank == 1 and len(one.top) == 2 for one in output.logprobs)
        assert len(output.prompt_token_ids) == 5
        of_prompt = [one and one.chosen.token_id for one in output.prompt_logprobs]
        assert of_prompt == [None, *output.prompt_token_ids[1:]]

    system.run(body)


def test_a_worker_wakes_up_when_a_grammar_is_there(system: System) -> None:
    """No message comes while it is compiled: without being woken, the worker would wait for ever."""

    async def body() -> None:
        async with system.shared() as omni:
            sampling = SamplingParams(max_tokens=9, structured_outputs=StructuredOutput(regex="[p-s]{4}"))
            output = await omni.generate({**both("hello"), "modalities": ["text"], "sampling": {"counter": sampling}})
            assert len(output.text) == 4
            assert set(output.text) <= set("pqrs")
            assert output.finish_reason == "stop"

            with pytest.raises(InvalidRequest, match="parenthesis") as caught:
                await omni.generate({**both("hello"), "sampling": {"counter": {"structured_outputs": {"regex": "(p"}}}})
            assert caught.value.field == "sampling.counter.structured_outputs"

    system.run(body)
