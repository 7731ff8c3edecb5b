"""Requests that go on from earlier ones: equal outputs, also after deaths between them, and what is retained."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from toy_system import Gate, System, answer, both, collect, expected_ids, kill, pid_of

from segue.graph.deployment.deployment import Limits
from segue.messages.errors import InvalidRequest, NotFound
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import RequestOutput
from segue.orchestrator.requests.client_queue import ClientQueue
from segue.orchestrator.requests.kept import KeptRequests, check_kept
from segue.orchestrator.requests.request_state import RequestState

pytestmark = pytest.mark.usefixtures("toy_path")


def ids_of(text: str) -> list[int]:
    from segue_toy.stages import VOCAB

    return [1 + ord(letter) % (VOCAB - 1) for letter in text]


def asked(text: str, after: RequestOutput | None = None, **fields: Any) -> dict[str, Any]:
    return {**both(text), "keep": True, "previous": None if after is None else after.request_id, **fields}


def assert_goes_on(output: RequestOutput, *texts: str) -> None:
    """The reply is to the last of the texts, and each token of the conversation has its samples: those of earlier
    replies are a part of the prompt."""
    from segue_toy.stages import SAMPLES_PER_TOKEN, VOCAB

    assert output.text == answer(texts[-1])
    assert output.token_ids == {"counter": expected_ids(texts[-1])}
    said = [token for text in texts for token in (*ids_of(text), *expected_ids(text))]
    assert output.audio is not None
    values = np.array(said[:-1], dtype=np.float32) / VOCAB  # the last token is never computed
    np.testing.assert_allclose(output.audio.samples, np.repeat(values, SAMPLES_PER_TOKEN), rtol=1e-6)
    assert output.usage.prompt_tokens == len(said) - len(expected_ids(texts[-1]))


def stats_of(omni: AsyncOmni) -> dict[str, Any]:
    """The counter's latest stats."""
    found = (stage for stats in omni.orchestrator.stats.values() for stage in stats.stages)
    return next((dict(stage.values) for stage in found if stage.stage == "counter"), {})


def test_several_go_on_from_one(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            first = await collect(omni, asked("the first of all"))
            this, that = await asyncio.gather(
                collect(omni, asked("this", first)), collect(omni, asked("another one", first))
            )
            assert_goes_on(this, "the first of all", "this")
            assert_goes_on(that, "the first of all", "another one")
            assert_goes_on(await collect(omni, asked("and on", that)), "the first of all", "another one", "and on")
            assert this.usage.cached_tokens == that.usage.cached_tokens > 0

    system.run(body)


@pytest.mark.parametrize(
    "victims", [pytest.param(("counter",), marks=pytest.mark.nightly), ("input", "counter", "tone")]
)
def test_killed_between_two_turns(system: System, victims: tuple[str, ...]) -> None:
    async def body() -> None:
        async with system.own() as omni:
            first = await collect(omni, asked("one"))
            second = await collect(omni, asked("two", first))
            for stage in victims:
                await kill(pid_of(omni.health(), stage))
            assert_goes_on(await collect(omni, asked("three", second)), "one", "two", "three")
            assert_goes_on(await collect(omni, asked("four", first)), "one", "four")

    system.run(body)


def test_killed_in_a_turn(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        async with system.own() as omni:
            first = await collect(omni, asked("one"))
            gate = Gate(tmp_path)
            options = {"hold": gate.option("counter", 3)}
            running = asyncio.create_task(collect(omni, asked("two", first, options=options)))
            held = await gate.reached()
            gate.remove()
            await kill(pid_of(omni.health(), "counter"), held)
            second = await running
            assert second.metrics.attempts == 2
            assert_goes_on(second, "one", "two")
            assert_goes_on(await collect(omni, asked("three", second)), "one", "two", "three")

    system.run(body)


def ended(name: str, *, after: str | None = None, tenant: str = "", kept: KeptRequests | None = None) -> RequestState:
    """A request that has ended, with 100 units."""
    request = Request(request_id=name, keep=name, previous=after, tenant=tenant, prompt=name)
    if kept is not None:
        kept.follow(request)
    state = RequestState(request=request, walk={}, main="counter", queue=ClientQueue(1))
    state.journal["counter"] = {0: [1] * 100}
    return state


def test_it_is_retained_within_limits() -> None:
    async def body() -> None:
        kept = KeptRequests(Limits(max_kept=2))
        for name in ("one", "two", "three"):
            kept.add(ended(name))
        with pytest.raises(NotFound, match="max_kept 2") as caught:
            ended("more", after="one", kept=kept)
        assert caught.value.field == "previous"
        size = kept.nbytes
        kept.add(ended("four", after="three", kept=kept))  # "two" is forgotten, "three" is in two conversations now
        assert abs(kept.nbytes - size) < 10, "what two conversations share counts once"
        kept.forget(("", "three"))
        going_on = ended("five", after="four", kept=kept).request
        assert [one.request.prompt for one in going_on.earlier] == ["three", "four"]
        assert [len(one.units) for one in going_on.earlier] == [100, 100]
        with pytest.raises(NotFound):
            ended("six", after="four", tenant="another", kept=kept)
        kept.clear()
        assert (len(kept), kept.nbytes) == (0, 0)
        small = KeptRequests(Limits(kept_bytes=1000))
        small.add(ended("one"))
        assert (len(small), small.nbytes) == (0, 0)
        brief = KeptRequests(Limits(kept_seconds=0.001))
        brief.add(ended("one"))
        while len(brief):
            await asyncio.sleep(0)

    asyncio.run(body())


def test_blocks_are_held_and_given_back(system: System) -> None:
    async def body() -> None:
        async with system.own(stages={"counter": {"hold_seconds": 0.01}}) as omni:
            await collect(omni, asked("one"))
            while not stats_of(omni).get("holds_expired_total"):
                await collect(omni, both("another"))  # its steps find that the deadline is over
            assert (stats_of(omni)["held_blocks"], stats_of(omni)["holding"]) == (0, 0)

    system.run(body)


def test_what_did_not_end_is_not_kept(system: System, tmp_path: Path) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            gate = Gate(tmp_path)
            request = omni.request(asked("one", options={"hold": gate.option("counter", 3)}))
            deltas = omni.stream(request)
            await anext(deltas)
            held = await gate.reached()
            gate.remove()
            with pytest.raises(NotFound):  # it runs
                await collect(omni, {**both("two"), "previous": request.request_id})
            await deltas.aclose()
            os.close(held)
            with pytest.raises(NotFound):
                await collect(omni, {**both("two"), "previous": request.request_id})
            plain = await collect(omni, both("one"))
            with pytest.raises(NotFound):
                await collect(omni, {**both("two"), "previous": plain.request_id})
            mine = omni.request(asked("one"))
            mine.tenant = "me"
            async for _ in omni.stream(mine):
                pass
            with pytest.raises(NotFound):
                await collect(omni, {**both("two"), "previous": mine.request_id})

    system.run(body)


def test_what_is_refused(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            for prompt, field in (
                ({**both("one"), "keep": "yes"}, "keep"),
                ({**both("one"), "keep": True, "sampling": SamplingParams(n=2)}, "sampling.counter.n"),
            ):
                with pytest.raises(InvalidRequest) as caught:
                    await collect(omni, prompt)
                assert caught.value.field == field
            for prompt in (asked("one"), {**both("one"), "previous": "x"}):
                with pytest.raises(InvalidRequest, match="an open request goes on by what is appended"):
                    omni.open(omni.request(prompt))
            card = msgspec.structs.replace(omni.card, goes_on=False)  # of a family that makes one prompt of one request
            for prompt, field in ((asked("one"), "keep"), ({**both("one"), "previous": "x"}, "previous")):
                with pytest.raises(InvalidRequest, match="does not go on from earlier requests") as caught:
                    check_kept(omni.request(prompt), card)
                assert caught.value.field == field

    system.run(body)
