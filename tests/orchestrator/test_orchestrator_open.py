"""Requests whose input is appended while they run: what comes out, however the input is split and whoever dies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_system import Gate, System, both, expected_ids, kill, pid_of

from segue.messages.deltas import Delta, Finished, TextDelta, TurnEnded
from segue.messages.errors import Cancelled, InvalidRequest, SegueError, TooLarge, TooLong
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import Collector, RequestOutput
from segue.orchestrator.requests.open_request import OpenRequest

pytestmark = pytest.mark.usefixtures("toy_path")


def ids_of(text: str) -> list[int]:
    from segue_toy.stages import VOCAB

    return [1 + ord(letter) % (VOCAB - 1) for letter in text]


def open_one(omni: AsyncOmni, text: str, *, reply: bool = False, **options: Any) -> OpenRequest:
    return omni.open(omni.request(both(text, **options)), reply=reply)


def assert_said(output: RequestOutput, *turns: str) -> None:
    """Each turn of the input has its reply, and each token that was computed its samples, once and in order."""
    from segue_toy.stages import SAMPLES_PER_TOKEN, VOCAB, text_of

    replies = [expected_ids(text) for text in turns]
    told = [token for ids in replies for token in ids]
    assert output.token_ids == {"counter": told}
    assert output.text == text_of([token for token in told if token])
    said = [token for text, ids in zip(turns, replies, strict=True) for token in (*ids_of(text), *ids)]
    assert output.audio is not None
    values = np.array(said[:-1], dtype=np.float32) / VOCAB  # the last token is never computed
    np.testing.assert_allclose(output.audio.samples, np.repeat(values, SAMPLES_PER_TOKEN), rtol=1e-6)
    assert output.usage.prompt_tokens == sum(map(len, turns))


class Listener:
    """Collects what an open request gives."""

    def __init__(self, request: OpenRequest) -> None:
        self.request = request
        self._collector = Collector(request.request_id, wants_audio=True)
        self.deltas: list[Delta] = []

    async def turn(self) -> Delta:
        """The delta that ends the reply."""
        async for delta in self.request.turn():
            self.deltas.append(delta)
            self._collector.add(delta)
        return self.deltas[-1]

    async def output(self) -> RequestOutput:
        while not isinstance(await self.turn(), Finished):
            pass
        return self._collector.output()


def test_pieces_equal_the_whole(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni, open_one(omni, "once") as request:
            for piece in (" upon", " a", ids_of(" ti"), "me"):
                await request.append(piece)
            await request.close()
            await request.close()
            assert_said(await Listener(request).output(), "once upon a time")

    system.run(body)


def test_the_model_replies_to_each_turn_and_goes_on(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            async with open_one(omni, "one", reply=True) as request:
                listener = Listener(request)
                assert await listener.turn() == TurnEnded("counter", "stop" if 0 in expected_ids("one") else "length")
                await request.append("t")
                await request.append("wo", reply=True)
                assert isinstance(await listener.turn(), TurnEnded)
                await request.append("three")
                await request.close()
                assert_said(await listener.output(), "one", "two", "three")
            # sent before the replies, and closed after a reply: the same
            async with open_one(omni, "one", reply=True) as request:
                await request.append("two", reply=True)
                await request.close()
                listener = Listener(request)
                assert_said(await listener.output(), "one", "two")
                ends = [delta for delta in listener.deltas if isinstance(delta, TurnEnded)]
                assert 1 <= len(ends) <= 2  # the last turn ends the request if it was closed before
                last = listener.deltas[-1]
                assert isinstance(last, Finished)
                assert last.finish_reason == ("stop" if 0 in expected_ids("two") else "length")

    system.run(body)


@pytest.mark.parametrize(
    "victims",
    [
        ("counter", "tone"),
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in [("counter",), ("input",), ("tone",), ("counter", "input")]
        ),
    ],
)
def test_killed_while_it_holds(system: System, victims: tuple[str, ...]) -> None:
    async def body() -> None:
        async with system.own() as omni, open_one(omni, "one", reply=True) as request:
            listener = Listener(request)
            assert isinstance(await listener.turn(), TurnEnded)
            await request.append("tw")
            for stage in victims:
                await kill(pid_of(omni.health(), stage))
            await request.append("o", reply=True)
            assert isinstance(await listener.turn(), TurnEnded)
            await request.append("three")
            await request.close()
            output = await listener.output()
            assert_said(output, "one", "two", "three")
            assert output.metrics.attempts > 1
            assert sum(isinstance(delta, TurnEnded) for delta in listener.deltas) == 2

    system.run(body)


@pytest.mark.parametrize(
    ("stage", "at"),
    [*(pytest.param("forward", at, marks=pytest.mark.nightly) for at in (0, 3)), ("counter", 25)],
)
def test_killed_while_it_computes_what_was_appended(system: System, tmp_path: Path, stage: str, at: int) -> None:
    """`forward`: at this place of a piece; `counter`: after so many units, in the second turn."""
    hold = {"stage": stage, "at": at, "fifo": str(tmp_path / "gate")}

    async def body() -> None:
        async with system.own() as omni, open_one(omni, "one", reply=True, hold=hold) as request:
            listener = Listener(request)
            assert isinstance(await listener.turn(), TurnEnded)
            gate = Gate(tmp_path)
            await request.append("two", reply=True)
            held = await gate.reached()
            await request.append("three", reply=True)
            gate.remove()
            await kill(pid_of(omni.health(), "counter"), held)
            await request.close()
            output = await listener.output()
            assert_said(output, "one", "two", "three")
            assert output.metrics.attempts == 2

    system.run(body)


def test_cancelled_while_it_holds(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            async with open_one(omni, "one", reply=True) as request:
                assert isinstance(await Listener(request).turn(), TurnEnded)
            assert request.request_id not in omni.orchestrator.requests
            await refused(lambda: request.append("two"), InvalidRequest, "append", "closed")
            left = open_one(omni, "never read")
            await left.cancel()
            assert not omni.orchestrator.requests

    system.run(body)


def test_what_is_refused(system: System) -> None:
    async def body() -> None:
        async with system.own(limits={"max_appends": 2, "max_appended_bytes": 20}) as omni:
            async with open_one(omni, "one") as request:
                await refused(lambda: request.append(""), InvalidRequest, "append", "at least one character")
                await refused(lambda: request.append([]), InvalidRequest, "append", "at least one token id")
                await refused(lambda: request.append([1.5]), InvalidRequest, "append", "token ids")
                await refused(lambda: request.append(7), InvalidRequest, "append", "7")
                await refused(lambda: request.append("x", reply=1), InvalidRequest, "reply", "1")
                await refused(lambda: request.append("x" * 21), TooLarge, "append", "max_appended_bytes")
                await request.append([5, 6, 7])
                await refused(lambda: request.append("x" * 9), TooLarge, "append", "after 12 before")
                await request.append("x")
                await refused(lambda: request.append("x"), InvalidRequest, "append", "limits.max_appends")
                await request.close()
                await refused(lambda: request.append("x"), InvalidRequest, "append", "closed")
                output = await Listener(request).output()
                assert output.token_ids == {"counter": expected_ids("x")}
                with pytest.raises(StopAsyncIteration):
                    await anext(request)
            several = omni.request("one", sampling=SamplingParams(n=2))
            for asked, field in (
                (several, "sampling.counter.n"),
                (omni.request("x", modalities=["tokens"]), "modalities"),
            ):
                with pytest.raises(InvalidRequest) as caught:
                    omni.open(asked)
                assert caught.value.field == field
            omni.card.appends = False  # as of a family that takes its input at once
            with pytest.raises(InvalidRequest) as caught:
                omni.open(omni.request("one"))
            assert caught.value.field == "open"
            asked = omni.request("one")
            asked.open = True
            with pytest.raises(InvalidRequest, match=r"AsyncOmni\.open"):
                omni.stream(asked)

    system.run(body)


def test_more_than_the_stage_can_hold(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni, open_one(omni, "x" * 400) as request:
            await request.append("y" * 200)
            with pytest.raises(TooLong) as caught:
                await Listener(request).output()
            assert caught.value.field == "append"
            await refused(lambda: request.append("z"), InvalidRequest, "append", "had ended")

    system.run(body)


def test_the_deadline_ends_a_request_that_holds(system: System) -> None:
    async def body() -> None:
        async with system.own(limits={"default_deadline": 2.0}) as omni, open_one(omni, "one") as request:
            with pytest.raises(SegueError) as caught:
                await Listener(request).output()
            assert not isinstance(caught.value, Cancelled)
            assert "deadline" in caught.value.message

    system.run(body)


def test_text_comes_before_the_input_is_closed(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            asked = omni.request({"messages": [{"role": "user", "content": "one"}], "modalities": ["text"]})
            async with omni.open(asked, reply=True) as request:
                deltas = [delta async for delta in request.turn()]
                assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
                await request.close()
                [end] = [delta async for delta in request]
                assert isinstance(end, Finished)
                assert end.token_ids == {"counter": expected_ids("one")}

    system.run(body)


async def refused(call: Callable[[], Awaitable[None]], kind: type[SegueError], field: str, said: str) -> None:
    with pytest.raises(kind) as caught:
        await call()
    assert caught.value.field == field
    assert said in caught.value.message
