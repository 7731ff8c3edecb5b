"""A walk that returns to a stage: its output, also after kills, and what a cancelled one leaves."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from toy_system import Gate, System, collect, kill, pid_of

from segue.messages.deltas import Delta, EncodedDelta
from segue.messages.errors import InvalidRequest, SegueError, StageFailed
from segue.messages.formats import Format
from segue.messages.sampling import SamplingParams
from segue.messages.stats import WorkerStats
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("toy_path")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, toy_path: None) -> Iterator[System]:
    from segue_toy.family import make

    system = System(make(tmp_path_factory.mktemp("loop"), "ToyLoop"))
    yield system
    system.close()


def draws(text: str, *others: str, **options: Any) -> dict[str, Any]:
    message = {"messages": [{"role": "user", "content": text}], "modalities": ["text", "image", *others]}
    return {**message, "options": options} if options else message


def reference(text: str, every: int, most: int = 3) -> tuple[list[int], list[int], bool, list[int]]:
    """(the writer's ids, the values of the images, whether the bound ended it, all tokens that were computed): one
    visit after the other."""
    from segue_toy.loop.stages import seen, value_of
    from segue_toy.stages import VOCAB, next_token

    piece, newest, ids, values = [1 + ord(letter) % (VOCAB - 1) for letter in text], [], [], []
    computed: list[int] = []
    for visit in range(most + 1):
        told: list[int] = []
        while len(told) < 20 and (not told or told[-1] != 0):
            told.append(next_token(told[-1] if told else piece[-1]))
        ids += told
        computed += [*newest, *piece, *told[:-1]]
        if sum(told) % every:
            return ids, values, False, computed
        values.append(value_of([*newest, *piece, *told[:-1]]))
        piece, newest = seen(values[-1]), told[-1:]
        if visit == most:
            return ids, values, True, computed
    raise AssertionError


def assert_drawn(output: RequestOutput, text: str, every: int = 1) -> None:
    from segue_toy.stages import SAMPLES_PER_TOKEN, VOCAB, text_of

    ids, values, bound, computed = reference(text, every)
    assert output.token_ids == {"writer": ids}
    assert output.text == text_of([token for token in ids if token])
    assert [image.getpixel((0, 0))[0] for image in output.images] == values
    assert (output.outputs[0].stop_reason == "the bound of edge see -> writer") is bound
    assert output.finish_reason == ("length" if bound or ids[-1] else "stop")
    if output.audio is not None:
        np.testing.assert_allclose(output.audio.samples, np.repeat(np.float32(computed) / VOCAB, SAMPLES_PER_TOKEN))


def test_text_and_images_by_turns(loop: System) -> None:
    async def body() -> None:
        async with loop.shared() as omni:
            cases = [(text, every) for text in ("one", "two", "three", "a tale") for every in (1, 2, 3, 1000)]
            outputs = await asyncio.gather(*(collect(omni, draws(text, "audio", every=every)) for text, every in cases))
            for output, (text, every) in zip(outputs, cases, strict=True):
                assert_drawn(output, text, every)
            lengths = {len(reference(*case)[1]) for case in cases}
            assert {0, 4} < lengths, "loops of different lengths"
            assert outputs[0].usage.prompt_tokens == len("one") + 3 * 3
            assert outputs[0].metrics.attempts == 1

    loop.run(body)


@pytest.mark.nightly
def test_modules_refine_until_it_is_good(toy_path: None, tmp_path: Path) -> None:
    """No stage of this loop holds: each visit runs on its own, and one that dies is run again."""
    from segue_toy.family import make
    from segue_toy.loop.stages import value_of

    def expected(text: str, fine: int) -> list[int]:
        values = [value_of([1 + ord(letter) % 96 for letter in text]) // 2]
        while values[-1] > fine and len(values) < 4:
            values.append(values[-1] // 2)
        return values

    async def body() -> None:
        async with refining.own() as omni:
            cases = [(text, fine) for text in ("one", "two", "three") for fine in (0, 20, 500)]
            outputs = await asyncio.gather(*(collect(omni, refined(text, fine=fine)) for text, fine in cases))
            for output, (text, fine) in zip(outputs, cases, strict=True):
                assert [image.getpixel((0, 0))[0] for image in output.images] == expected(text, fine)
            for stage, victims in (
                ("judge", ("polish", "judge")),
                ("polish", ("polish",)),
                ("judge", ("show", "judge")),
            ):
                gate = Gate(tmp_path)
                asking = asyncio.create_task(collect(omni, refined("one", fine=0, hold=gate.option(stage, 2))))
                held = await gate.reached()
                gate.remove()
                for victim in victims:
                    await kill(pid_of(omni.health(), victim), held if victim == stage else None)
                output = await asking
                assert [image.getpixel((0, 0))[0] for image in output.images] == expected("one", 0)
            await nothing_left(omni)

    refining = System(make(tmp_path / "model", "ToyLoop", refine=True))
    refining.run(body)
    refining.close()


def refined(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "modalities": ["image"], "options": options}


VICTIMS = [("writer",), ("draw",), ("see",), ("writer", "draw"), ("writer", "see", "show"), ("draw", "see", "input")]
ALL = [("draw", 0), ("draw", 2), ("show", 1), ("see", 0), ("see", 1), ("forward", 0), ("counter", 25)]
PLACES = [("draw", 2, VICTIMS[4:5]), *(pytest.param(*place, VICTIMS, marks=pytest.mark.nightly) for place in ALL)]
"""Where a request is held while workers die, in this visit (of the writer, at this place of the sequence or unit); and
which die."""


@pytest.mark.parametrize(("stage", "at", "lists"), PLACES)
def test_killed_between_and_inside_visits(
    loop: System, tmp_path: Path, stage: str, at: int, lists: list[tuple[str, ...]]
) -> None:
    """kill -9 of each of these, while the request is held there and others run: the outcome is the undisturbed one."""

    async def body() -> None:
        async with loop.own() as omni:
            for number, victims in enumerate(lists):
                (tmp_path / str(number)).mkdir()
                gate = Gate(tmp_path / str(number))
                prompt = draws("a tale", "audio", every=1, hold=gate.option(stage, at))
                asking = asyncio.create_task(collect(omni, prompt))
                held = await gate.reached()
                other = asyncio.create_task(collect(omni, draws("bystander", every=1)))
                gate.remove()
                home = {"forward": "writer", "counter": "writer"}.get(stage, stage)
                for victim in dict.fromkeys((*victims, home)):
                    await kill(pid_of(omni.health(), victim), held if victim == home else None)
                output = await asking
                assert_drawn(output, "a tale")
                assert output.metrics.attempts > 1
                assert_drawn(await other, "bystander")
            await nothing_left(omni)

    loop.run(body)


@pytest.mark.parametrize(("stage", "at"), [("draw", 1), ("see", 0), ("see", 2), ("counter", 25)])
def test_a_client_that_leaves(loop: System, tmp_path: Path, stage: str, at: int) -> None:
    async def body() -> None:
        gate = Gate(tmp_path)
        async with loop.shared() as omni:
            asking = asyncio.create_task(collect(omni, draws("a tale", every=1, hold=gate.option(stage, at))))
            held = await gate.reached()
            asking.cancel()
            gate.remove()
            os.close(held)
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert_drawn(await collect(omni, draws("next", every=1)), "next")
            await nothing_left(omni)

    loop.run(body)


def test_visits_stay_with_the_replica_that_holds_the_sequence(loop: System, tmp_path: Path) -> None:
    async def body() -> None:
        twice = {name: {"replicas": 2} for name in ("writer", "draw", "show", "see")}
        async with loop.own(stages=twice) as omni:
            await all_ready(omni)
            cases = [(text, every) for text in ("one", "two", "three", "a tale") for every in (1, 2)]
            outputs = await asyncio.gather(*(collect(omni, draws(text, every=every)) for text, every in cases))
            for output, (text, every) in zip(outputs, cases, strict=True):
                assert_drawn(output, text, every)
            await nothing_left(omni)
            read = [stage.values["prefill_tokens_total"] for stage in stages_of(omni, "writer")]
            assert min(read) > 0, "both serve"
            # a visit reads what came back, and the token that was drawn last before it: nothing is computed again
            assert sum(read) == sum(len(text) + 4 * visits(text, every) for text, every in cases)
            gate = Gate(tmp_path)
            prompt = draws("a tale", "audio", every=1, hold=gate.option("see", 1))
            asking = asyncio.create_task(collect(omni, prompt))
            held = await gate.reached()
            [state] = omni.orchestrator.requests.values()
            holding = omni.orchestrator.replicas.by_worker(state.stages["writer"].worker)
            assert holding is not None
            assert holding.pid is not None
            gate.remove()
            await kill(holding.pid)
            os.close(held)
            output = await asking
            assert_drawn(output, "a tale")
            assert output.metrics.attempts == 2
            await nothing_left(omni)

    loop.run(body)


def test_images_of_all_visits_are_files(loop: System) -> None:
    async def body() -> None:
        async with loop.shared() as omni:
            request = omni.request(draws("a tale", every=1))
            request.formats = {"image": Format(name="png")}
            files: dict[int, bytes] = {}
            async for delta in omni.stream(request):
                if isinstance(delta, EncodedDelta):
                    assert (delta.kind, delta.last) == ("image", True)
                    files[delta.index] = files.get(delta.index, b"") + delta.data
            values = [Image.open(io.BytesIO(files[index])).getpixel((0, 0)) for index in sorted(files)]
            assert values == [(value,) * 3 for value in reference("a tale", 1)[1]]
            spoken = omni.request(draws("a tale", "audio", every=1))
            spoken.formats = {"audio": Format(name="wav")}
            with pytest.raises(InvalidRequest, match="stage 'tone' may be visited several times") as caught:
                await anext(omni.stream(spoken))
            assert caught.value.field == "formats.audio"
            await nothing_left(omni)

    loop.run(body)


def visits(text: str, every: int) -> int:
    """Times that the writer is visited again."""
    _, values, bound, _ = reference(text, every)
    return len(values) - bound


def stages_of(omni: AsyncOmni, name: str) -> list[WorkerStats]:
    """The latest stats of a stage's replicas."""
    return [stage for stats in omni.orchestrator.stats.values() for stage in stats.stages if stage.stage == name]


async def all_ready(omni: AsyncOmni) -> None:
    while any(replica.state != "ready" for replica in omni.orchestrator.replicas.all):
        await asyncio.sleep(0)


async def nothing_left(omni: AsyncOmni) -> None:
    """No worker keeps anything of a request."""
    assert not omni.orchestrator.requests
    end = asyncio.get_running_loop().time() + 30
    while left := leftovers(omni):
        assert asyncio.get_running_loop().time() < end, left
        await asyncio.sleep(0.1)  # the stats of a worker come when it is idle


def leftovers(omni: AsyncOmni) -> dict[str, float]:
    """The gauges of running workers that say what is kept for requests."""
    alive = omni.orchestrator.replicas.alive()
    kept = ("requests", "holding", "held_blocks", "waiting", "running", "retained_bytes", "early_chunks")
    found: dict[str, float] = {}
    for worker in alive & omni.orchestrator.stats.keys():
        for stage in omni.orchestrator.stats[worker].stages:
            found |= {f"{worker} {key}": float(stage.values.get(key, 0)) for key in kept}
            for edge, here in stage.edges.items():
                found |= {
                    f"{worker} {edge} {key}": here.get(key, 0) for key in ("in_flight_bytes", "flows", "pending_chunks")
                }
    return {what: value for what, value in found.items() if value}


def test_what_is_refused(loop: System) -> None:
    async def body() -> None:
        async with loop.shared() as omni:
            for options, said in (
                ({"breaks": True}, "'asks_for_image' of edge 'writer' -> 'draw' raised LookupError: told to break"),
                ({"vague": True}, "'asks_for_image' of edge 'writer' -> 'draw' gave None; it must give True or False"),
            ):
                with pytest.raises(StageFailed, match=said) as failed:
                    await collect(omni, draws("one", **options))
                assert failed.value.stage == "writer"
            with pytest.raises(InvalidRequest) as caught:
                await collect(omni, {**draws("one"), "sampling": SamplingParams(n=2)})
            assert caught.value.field == "sampling.writer.n"
            for stage, at in (("draw", 1), ("see", 2)):
                with pytest.raises(SegueError, match=f"told to fail at {at}"):
                    await collect(omni, draws("one", fail_at={"stage": stage, "at": at}))
            assert_drawn(await collect(omni, draws("next")), "next")
            await nothing_left(omni)

    loop.run(body)


EVENTS = st.sampled_from([None, "leaves", "writer", "draw", "see", "show"])
ASKED = st.tuples(st.sampled_from(["one", "two", "three", "a tale"]), st.sampled_from([1, 2, 1000]), EVENTS,
                  st.integers(1, 8))  # fmt: skip
"""A text, when it has an image drawn, what happens, and after how many deltas: the client leaves, or a worker dies."""


@pytest.mark.nightly
@settings(max_examples=8)
@given(st.lists(ASKED, min_size=2, max_size=4))
def test_deaths_and_cancels_at_any_time(loop: System, asked: list[tuple[str, int, str | None, int]]) -> None:
    """Clients that stay get the undisturbed outcome, and nothing is left."""

    async def one(omni: AsyncOmni, text: str, every: int, event: str | None, after: int) -> None:
        deltas = 0

        def seen(delta: Delta) -> None:
            nonlocal deltas
            deltas += 1
            if deltas != after:
                return
            if event == "leaves":
                asking.cancel()
            elif event is not None:
                pids = [replica.pid for replica in omni.health().stages[event].replicas if replica.pid is not None]
                for pid in pids:
                    with suppress(ProcessLookupError):  # another request's event was faster
                        os.kill(pid, signal.SIGKILL)

        asking = asyncio.create_task(collect(omni, draws(text, "audio", every=every), seen))
        try:
            assert_drawn(await asking, text, every)
        except asyncio.CancelledError:
            assert event == "leaves"

    assume(sum(event not in (None, "leaves") for _, _, event, _ in asked) <= 2)  # a request is tried three times

    async def body() -> None:
        async with loop.shared() as omni:
            await asyncio.gather(*(one(omni, *each) for each in asked))
            await nothing_left(omni)

    loop.run(body)
