"""The diffusion engine on a denoiser without a model: who is in a step, what comes of it, and what fails alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from diffusion_fakes import Ask, FakeDenoiser, truth
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.contract import StageOutput
from segue.engines.diffusion.batch import Candidate, choose
from segue.engines.diffusion.contract import Row
from segue.engines.diffusion.engine import DiffusionConfig, DiffusionEngine, preview_calls
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed, TooLarge

ASKS = st.lists(
    st.builds(
        Ask,
        name=st.just(""),
        calls=st.integers(1, 12),
        tokens=st.sampled_from([4, 64, 256]),
        guided=st.booleans(),
        outputs=st.integers(1, 3),
        priority=st.integers(0, 1),
    ),
    min_size=1,
    max_size=7,
)


def named(asks: Sequence[Ask]) -> list[Ask]:
    return [
        Ask(f"r{place}", ask.calls, ask.tokens, ask.guided, ask.outputs, ask.priority) for place, ask in enumerate(asks)
    ]


def engine_of(asks: Sequence[Ask], fake: FakeDenoiser | None = None, **config: Any) -> DiffusionEngine:
    fake = fake or FakeDenoiser()
    fake.asks.update({ask.name: ask for ask in asks})
    return DiffusionEngine(fake, DiffusionConfig(**config))


def join(engine: DiffusionEngine, ask: Ask, **payload: Any) -> None:
    engine.add(ask.request())
    engine.feed(ask.name, "input", payload, final=True)


def finish(engine: DiffusionEngine) -> list[StageOutput]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def latents_of(outputs: Sequence[StageOutput]) -> dict[tuple[str, int], torch.Tensor]:
    return {
        (output.request_id, output.index): output.payload["latents"]
        for output in outputs
        if output.payload is not None and "partial" not in output.payload
    }


@settings(max_examples=60, deadline=None)
@given(
    asks=ASKS, joins=st.lists(st.integers(0, 20), min_size=7, max_size=7), max_batch=st.integers(1, 9), data=st.data()
)
def test_every_request_gets_what_it_gets_alone(
    asks: list[Ask], joins: list[int], max_batch: int, data: st.DataObject
) -> None:
    """Whoever joins, leaves and stands still in between; and every step makes progress."""
    asks = named(asks)
    fake = FakeDenoiser()
    engine = engine_of(asks, fake, max_batch=max_batch)
    cancelled = data.draw(st.sets(st.sampled_from([ask.name for ask in asks])))
    paused = data.draw(st.sets(st.sampled_from([ask.name for ask in asks])))
    waiting = dict(zip([ask.name for ask in asks], joins, strict=False))
    by_name = {ask.name: ask for ask in asks}
    outputs: list[StageOutput] = []
    step = 0
    while waiting or engine.has_work():
        for name in [name for name, when in waiting.items() if when <= step]:
            del waiting[name]
            join(engine, by_name[name])
            if name in paused:
                engine.pause(name)
        if step == 10:
            for name in cancelled:
                waiting.pop(name, None)
                engine.cancel(name)
        if step == 30:
            for name in paused:
                engine.resume(name)
        before = len(fake.calls)
        had_work = engine.has_work()
        made = engine.step()
        assert len(fake.calls) - before == had_work, "a step is one call, and there is one where there is work"
        assert bool(made) == had_work
        if had_work:
            rows = fake.calls[-1]
            assert len(rows) <= max_batch or len(set(rows)) == 1
        outputs += made
        step += 1
        if step == 12 and not engine.has_work() and not waiting and paused - cancelled:
            step = 30
            for name in paused:
                engine.resume(name)
    for name in paused:
        engine.resume(name)
    outputs += finish(engine)
    made_latents = latents_of(outputs)
    finished = [output.request_id for output in outputs if output.finished]
    assert len(finished) == len(set(finished))
    for ask in asks:
        if ask.name in cancelled and ask.name not in finished:
            continue
        assert ask.name in finished
        for index in range(ask.outputs):
            torch.testing.assert_close(made_latents[ask.name, index], truth(ask, index), rtol=1e-12, atol=1e-12)
    assert not engine.has_work()
    assert sorted(fake.ended) == sorted({*finished, *(name for name in cancelled if name in fake.ended)})


@settings(max_examples=100, deadline=None)
@given(
    old=st.integers(5, 40),
    old_tokens=st.sampled_from([4, 64]),
    patience=st.integers(1, 6),
    arrivals=st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=60),
    max_batch=st.integers(1, 3),
)
def test_nobody_starves(old: int, old_tokens: int, patience: int, arrivals: list[list[int]], max_batch: int) -> None:
    """A stream of short requests of another size cannot hold up a long one by more than the stated bound."""
    fake = FakeDenoiser()
    engine = engine_of([], fake, patience=patience, max_batch=max_batch)
    long = Ask("long", calls=old, tokens=old_tokens)
    fake.asks["long"] = long
    join(engine, long)
    since, most_others = 0, 0
    for number, calls in enumerate(arrivals * 3):
        for place, count in enumerate(calls):
            short = Ask(f"s{number}.{place}", calls=count, tokens=16)
            fake.asks[short.name] = short
            join(engine, short)
        others = int(engine.stats()["running"]) - 1
        if any(output.finished and output.request_id == "long" for output in engine.step()):
            return
        if ("long", 0) in fake.calls[-1]:
            since, most_others = 0, 0
            continue
        since += 1
        if since == patience:
            most_others = others
        if since > patience:
            assert since <= patience + max(most_others, 1) + 1


def candidate(arrival: int, **given: Any) -> Candidate:
    values = {"bucket": 0, "rows": 1, "work": 1.0, "priority": 0, "passed": 0, **given}
    return Candidate(arrival=arrival, **values)


def test_the_least_work_first_then_who_was_passed_over() -> None:
    long, short, other = candidate(0, work=9.0), candidate(1, work=1.0), candidate(2, work=2.0, bucket=1)
    assert choose([long, short, other], lambda leader: 8, 4) == [short, long]
    assert choose([long, short, other], lambda leader: 1, 4) == [short]
    overdue = candidate(0, work=9.0, passed=4)
    assert choose([short, other, overdue], lambda leader: 1, 4) == [overdue]
    more = candidate(3, work=99.0, passed=6)
    assert choose([short, overdue, more], lambda leader: 1, 4) == [more]
    first = candidate(4, work=99.0, priority=-1)
    assert choose([short, overdue, more, first], lambda leader: 1, 4) == [first]
    wide = candidate(5, rows=4)
    assert choose([wide], lambda leader: 2, 4) == [wide]
    assert choose([], lambda leader: 2, 4) == []


def test_a_call_that_does_not_fit_is_made_in_halves_and_remembered() -> None:
    def fails(rows: Sequence[Row]) -> Exception | None:
        return torch.OutOfMemoryError("no") if len(rows) > 2 else None

    fake = FakeDenoiser(fails=fails)
    asks = [Ask(f"r{place}", guided=True) for place in range(4)]
    engine = engine_of(asks, fake)
    for ask in asks:
        join(engine, ask)
    outputs = finish(engine)
    made = latents_of(outputs)
    for ask in asks:
        torch.testing.assert_close(made[ask.name, 0], truth(ask, 0))
    assert engine.stats()["retries_total"] < 8, "the size that fits is known after the first time"
    assert max(map(len, fake.calls)) == 2


def test_a_row_that_never_fits_fails_its_request_alone() -> None:
    def fails(rows: Sequence[Row]) -> Exception | None:
        big = any(row.sample.request_id == "big" for row in rows)
        return RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried") if big else None

    asks = [Ask("big"), Ask("small")]
    engine = engine_of(asks, FakeDenoiser(fails=fails))
    for ask in asks:
        join(engine, ask)
    outputs = finish(engine)
    errors = {output.request_id: output.error for output in outputs if output.error}
    assert list(errors) == ["big"]
    assert isinstance(errors["big"], StageFailed)
    assert "smaller size" in str(errors["big"])
    assert errors["big"].stage == "denoiser"
    torch.testing.assert_close(latents_of(outputs)["small", 0], truth(asks[1], 0))


def test_a_row_that_there_is_no_memory_for_is_tried_once_more() -> None:
    """Calls before it leave memory behind, which is given back then. What is said in the end names what did fit."""
    tries: list[str] = []

    def fails(rows: Sequence[Row]) -> Exception | None:
        name = rows[0].sample.request_id
        tries.append(name)
        lacking = name == "never" or (name == "later" and tries.count(name) == 1)
        return RuntimeError("could not create a primitive") if lacking else None

    asks = [Ask("small", size=(64, 32)), Ask("later", tokens=6), Ask("never", tokens=8, size=(64, 128))]
    engine = engine_of(asks, FakeDenoiser(fails=fails))
    for ask in asks:
        join(engine, ask)
    outputs = finish(engine)
    [error] = [output.error for output in outputs if output.error]
    assert isinstance(error, StageFailed)
    assert "height 64 x width 128" in str(error)
    assert tries.count("never") == 2
    assert {name for name, _ in latents_of(outputs)} == {"small", "later"}


def test_what_failed_for_memory_holds_none() -> None:
    """What a row had got when it failed is gone when others of the call are computed."""
    held: list[weakref.ref[torch.Tensor]] = []

    def fails(rows: Sequence[Row]) -> Exception | None:
        assert all(one() is None for one in held)
        if all(row.sample.request_id == "small" for row in rows):
            return None
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise MemoryError

    asks = [Ask("big"), Ask("small")]
    engine = engine_of(asks, FakeDenoiser(fails=fails))
    for ask in asks:
        join(engine, ask)
    assert [output.request_id for output in finish(engine) if output.error] == ["big"]
    assert len(held) == 3, "with the other, alone, and once more"


def test_a_guilty_row_fails_alone() -> None:
    def fails(rows: Sequence[Row]) -> Exception | None:
        return ValueError("bad row") if any(row.sample.request_id == "r2" for row in rows) else None

    asks = [Ask(f"r{place}", outputs=2) for place in range(4)]
    engine = engine_of(asks, FakeDenoiser(fails=fails))
    for ask in asks:
        join(engine, ask)
    outputs = finish(engine)
    assert [output.request_id for output in outputs if output.error] == ["r2"]
    assert sorted(output.request_id for output in outputs if output.finished) == ["r0", "r1", "r2", "r3"]


def test_what_cannot_fit_is_refused_with_a_size_that_would() -> None:
    fake = FakeDenoiser(weight_bytes=100, bytes_per_token=10)
    small, large = Ask("small", tokens=90), Ask("large", tokens=91)
    engine = engine_of([small, large], fake, memory_bytes=1000)
    for ask in (small, large):
        join(engine, ask)
    outputs = finish(engine)
    [error] = [output.error for output in outputs if output.error]
    assert isinstance(error, TooLarge)
    assert "would fit" in str(error)
    assert ("small", 0) in latents_of(outputs)
    two = engine_of(
        [Ask("a", tokens=45), Ask("b", tokens=45), Ask("c", tokens=45)], FakeDenoiser(100, 10), memory_bytes=1000
    )
    for name in ("a", "b", "c"):
        join(two, Ask(name, tokens=45))
    two.step()
    assert two.stats()["batch"] == 2, "two rows fit"


@pytest.mark.parametrize(
    ("size", "tokens", "given", "offered"),
    [
        ((1024, 1024), 4096, 0, "480 x 480"),
        ((512, 2048), 4096, 0, "224 x 992"),
        ((64, 16384), 4096, 0, "32 x 8000"),
        ((1024, 1024), 4096 + 500, 500, "352 x 352"),  # images that are brought take as much at any size
        ((1024, 1024), 4096 + 1000, 1000, None),
    ],
)
def test_the_size_that_is_offered_fits(size: tuple[int, int], tokens: int, given: int, offered: str | None) -> None:
    ask = Ask("large", tokens=tokens, size=size, given=given)
    engine = engine_of([ask], FakeDenoiser(bytes_per_token=1), memory_bytes=1000)
    join(engine, ask)
    [output] = finish(engine)
    assert isinstance(output.error, TooLarge)
    assert f"height {size[0]} x width {size[1]}" in str(output.error)
    if offered is None:
        assert str(output.error).endswith("no size would fit")
        return
    assert str(output.error).endswith(f"{offered} would fit")
    height, width = map(int, offered.split(" x "))
    fits = Ask("fits", tokens=given + (tokens - given) * height * width // (size[0] * size[1]), size=(height, width))
    engine = engine_of([fits], FakeDenoiser(bytes_per_token=1), memory_bytes=1000)
    join(engine, fits)
    assert ("fits", 0) in latents_of(finish(engine))


def test_fewer_frames_where_no_size_would_fit() -> None:
    ask = Ask("long", tokens=400_000, size=(64, 64), frames=257)
    engine = engine_of([ask], FakeDenoiser(bytes_per_token=1), memory_bytes=1000)
    join(engine, ask)
    [output] = finish(engine)
    assert "and 257 frames" in str(output.error)
    assert "ask for fewer" in str(output.error)


def test_progress_and_previews() -> None:
    ask = Ask("r", calls=6, partial_images=2, outputs=2)
    engine = engine_of([ask])
    join(engine, ask)
    outputs = finish(engine)
    for index in (0, 1):
        mine = [output for output in outputs if output.index == index]
        assert [output.progress for output in mine if output.progress] == [(step, 6) for step in range(1, 7)]
        partial = [output.payload["partial"] for output in mine if output.payload and "partial" in output.payload]
        assert partial == [0, 1]
    assert [output.finished for output in outputs].count(True) == 1
    assert outputs[-1].finished


@given(calls=st.integers(1, 200), previews=st.integers(0, 20))
def test_previews_are_spread(calls: int, previews: int) -> None:
    due = preview_calls(calls, previews)
    assert due == sorted(set(due))
    assert all(1 <= call < calls for call in due)
    assert len(due) == min(previews, calls - 1)


def test_errors_of_one_request() -> None:
    asks = [Ask("good"), Ask("wrong"), Ask("cancelled")]
    fake = FakeDenoiser()
    engine = engine_of(asks, fake)
    join(engine, asks[0])
    join(engine, asks[1], wrong=True)
    join(engine, asks[2])
    engine.step()
    engine.cancel("cancelled")
    engine.cancel("unknown")
    engine.feed("unknown", "input", {}, final=True)
    with pytest.raises(InvalidRequest, match="already"):
        engine.add(asks[0].request())
    before = len(fake.calls)
    outputs = finish(engine)
    assert all(("cancelled", 0) not in rows for rows in fake.calls[before:]), "gone at the next step"
    assert {output.request_id for output in outputs} == {"good"}
    assert engine.stats()["running"] == 0


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_batch"):
        DiffusionConfig(max_batch=0)
