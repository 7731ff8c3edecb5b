"""Requests that go on from earlier ones: what comes out, whoever dies between them, and what is retained."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_system import Gate, System, answer, both, collect, expected_ids, kill, pid_of

from segue.messages.errors import InvalidRequest, NotFound
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import RequestOutput

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


@pytest.mark.parametrize("victims", [("counter",), ("input", "counter", "tone")])
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


def test_it_is_retained_within_limits(system: System) -> None:
    async def body() -> None:
        async with system.own(limits={"max_kept": 2}) as omni:
            outputs = [await collect(omni, asked(text)) for text in ("one", "two", "three")]
            kept = omni.orchestrator.kept
            assert len(kept) == 2
            with pytest.raises(NotFound, match="max_kept 2") as caught:
                await collect(omni, asked("four", outputs[0]))
            assert caught.value.field == "previous"
            follower = await collect(omni, asked("four", outputs[2]))  # "two" is forgotten, "three" is in two now
            assert 2 * 1024 < kept.nbytes < 3 * 1024  # what two conversations share counts once
            kept.forget(("", outputs[2].request_id))
            assert_goes_on(await collect(omni, asked("five", follower)), "three", "four", "five")
            kept.clear()
            assert kept.nbytes == 0
        async with system.own(limits={"kept_seconds": 0.01}) as omni:
            first = await collect(omni, asked("one"))
            while len(omni.orchestrator.kept):
                await asyncio.sleep(0)
            with pytest.raises(NotFound, match=r"kept_seconds is 0\.01"):
                await collect(omni, asked("two", first))
        async with system.own(limits={"kept_bytes": 600}) as omni:
            await collect(omni, asked("one"))
            assert (len(omni.orchestrator.kept), omni.orchestrator.kept.nbytes) == (0, 0)

    system.run(body)


def test_blocks_are_held_and_given_back(system: System) -> None:
    async def body() -> None:
        async with system.own(stages={"counter": {"hold_seconds": 0.01}}) as omni:
            await collect(omni, asked("one"))
            while not stats_of(omni).get("holds_expired_total"):
                await collect(omni, both("another"))  # its steps find that the deadline is over
            assert (stats_of(omni)["held_blocks"], stats_of(omni)["holding"]) == (0, 0)
        async with system.own() as omni:
            await collect(omni, asked("one"))
            while not stats_of(omni).get("held_blocks"):
                await asyncio.sleep(0)

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
        async with system.own() as omni:
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
            omni.card.goes_on = False  # as of a family that makes one prompt of one request
            for prompt, field in ((asked("one"), "keep"), ({**both("one"), "previous": "x"}, "previous")):
                with pytest.raises(InvalidRequest, match="does not go on from earlier requests") as caught:
                    await collect(omni, prompt)
                assert caught.value.field == field

    system.run(body)
