"""What comes out of the whole system on the toy family; its start and its end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from toy_system import Gate, System, assert_right, both, collect, pid_of

from segue.messages.deltas import AudioDelta, Delta, Finished, TextDelta, TokensDelta
from segue.messages.errors import (
    ConfigError,
    InvalidRequest,
)
from segue.messages.sampling import SamplingParams, StructuredOutput
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.blocking import Omni
from shm_names import abandoned

pytestmark = pytest.mark.usefixtures("toy_path")


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
        read, heard = asyncio.Event(), asyncio.Event()

        def note(delta: Delta) -> None:
            seen.append(delta)
            if isinstance(delta, TextDelta):
                read.set()
            if isinstance(delta, AudioDelta):
                heard.set()

        async with system.shared() as omni:
            task = asyncio.create_task(collect(omni, both("stream me", hold=gate.option("counter", 10)), note))
            held = await gate.reached()
            await asyncio.gather(read.wait(), heard.wait())
            assert not any(isinstance(delta, Finished) for delta in seen)
            os.close(held)
            assert_right(await task, "stream me")

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
        before = abandoned()
        async with system.own() as omni:
            assert_right(await omni.generate(both("x")), "x")
            workers = [psutil.Process(pid_of(omni.health(), stage)) for stage in ("input", "counter", "tone")]
            [server] = {worker.parent() for worker in workers}
            assert server is not None
            directory = omni.orchestrator.runtime_dir
            assert os.path.isdir(directory)
        assert not os.path.exists(directory)
        assert not [process for process in [server, *workers] if process.is_running()]
        assert abandoned() <= before

    system.run(body)


def test_omni_from_a_plain_script(toy_dir: Path) -> None:
    with Omni(toy_dir, progress=False) as omni:
        [one, two] = omni.generate([both("a script"), "another"], seed=3)
    assert_right(one, "a script")
    assert_right(two, "another")


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
            assert caught.value.field == "sampling.counter.structured_outputs.regex"

    system.run(body)


def test_where_grammars_are_compiled_may_be_killed(system: System) -> None:
    """While it is idle: it is reaped, and the next grammar is compiled in another."""
    sampling = {"counter": SamplingParams(max_tokens=9, structured_outputs=StructuredOutput(regex="[a-d]{5}"))}

    async def body() -> None:
        async with system.shared() as omni:
            worker = psutil.Process(pid_of(omni.health(), "counter"))
            [home] = worker.children()
            home.kill()
            output = await omni.generate({**both("hello"), "modalities": ["text"], "sampling": sampling})
            assert len(output.text) == 5
            assert set(output.text) <= set("abcd")
            await asyncio.to_thread(home.wait, 60)
            [another] = worker.children()
            assert another != home

    system.run(body)
