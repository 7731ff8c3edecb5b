"""The module engine over a made-up adapter: order, fairness, isolation of failures, an answer to every request."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.contract import Payload, StageOutput, StageRequest
from segue.engines.module.contract import Result, Work
from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams


def request(name: str, upstreams: frozenset[str] = frozenset({"up"}), priority: int = 0) -> StageRequest:
    return StageRequest(
        name,
        "stage",
        Request(request_id=name),
        SamplingParams(),
        0,
        upstreams,
        frozenset(),
        frozenset(),
        priority=priority,
    )


@dataclass
class Echo:
    """Makes one item per entry of the payload's `items` (bucket, cost, ordered) and answers each with its number.

    `poison` in an entry makes the call that holds it raise; `refuse` makes the item alone fail.
    """

    calls: list[list[str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)

    def warm_up(self) -> None:
        self.calls.append([])

    def begin(self, request: StageRequest) -> tuple[str, list[Work]]:
        if request.request_id.startswith("never"):
            raise InvalidRequest("it can never run", field="request_id")
        self.made[request.request_id] = 0
        if not request.upstreams:
            return request.request_id, [Work(request.request_id, {"number": 0}, last=True)]
        return request.request_id, []

    def feed(self, state: str, upstream: str, payload: Payload, *, final: bool) -> list[Work]:
        if "broken" in payload:
            raise ValueError("broken chunk")
        works = []
        for entry in payload["items"]:
            number = self.made[state]
            self.made[state] += 1
            ordered, bucket, cost = entry.get("ordered", True), entry.get("bucket"), entry.get("cost", 1)
            played_at = entry.get("played_at")
            works.append(Work(state, {"number": number, **entry}, bucket, cost, ordered=ordered, played_at=played_at))
        if final and works:
            works[-1].last = True
        return works

    def run(self, works: list[Work]) -> list[Result]:
        self.calls.append([work.request_id for work in works])
        self.sizes.append(sum(work.cost for work in works))
        assert len({work.bucket for work in works}) == 1
        if any(work.item.get("poison") for work in works):
            raise RuntimeError("poison")
        return [
            Result(error=StageFailed("refused")) if work.item.get("refuse") else Result({"number": work.item["number"]})
            for work in works
        ]

    def end(self, state: str) -> None:
        self.ended.append(state)


def drain(engine: ModuleEngine) -> list[StageOutput]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def feed(engine: ModuleEngine, name: str, *items: dict[str, Any], final: bool = True) -> None:
    engine.feed(name, "up", {"items": list(items)}, final=final)


def test_priority_comes_before_age_and_within_it_the_oldest_is_first() -> None:
    adapter = Echo()
    engine = ModuleEngine(adapter, ModuleConfig(max_batch=1))
    for name, priority in (("plain", 0), ("late", 5), ("urgent", -1), ("plain too", 0)):
        engine.add(request(name, priority=priority))
        feed(engine, name, {}, {})
    engine.step()
    engine.add(request("most urgent", priority=-2))
    feed(engine, "most urgent", {})
    drain(engine)
    order = ["urgent", "most urgent", "urgent", *["plain"] * 2, *["plain too"] * 2, *["late"] * 2]
    assert [name for call in adapter.calls for name in call] == order


ITEM = st.fixed_dictionaries({"bucket": st.sampled_from("ab"), "cost": st.integers(1, 5), "ordered": st.booleans()})
NAME = st.sampled_from([f"r{index}" for index in range(5)])
OPERATION = st.one_of(
    st.tuples(st.just("feed"), NAME, st.lists(ITEM, max_size=4)),
    st.tuples(st.just("final"), NAME, st.lists(ITEM, min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["cancel", "pause", "resume", "step"]), NAME, st.just([])),
)


@given(st.lists(OPERATION, max_size=40), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 8)))
@settings(max_examples=300, deadline=None)
def test_order_is_kept_and_nothing_is_lost_or_run_after_cancel(
    operations: list[tuple[str, str, list[dict[str, Any]]]], max_batch: int, max_cost: int | None
) -> None:
    adapter = Echo()
    engine = ModuleEngine(adapter, ModuleConfig(max_batch, max_cost))
    for index in range(5):
        engine.add(request(f"r{index}"))
    fed = dict.fromkeys(adapter.made, 0)
    open_, cancelled, paused = set(fed), set(), set()
    outputs: list[StageOutput] = []

    def step() -> None:
        before = len(adapter.calls)
        new = engine.step()
        assert not {output.request_id for output in new} & (cancelled | paused)
        assert len(new) <= max_batch
        assert max_cost is None or len(new) <= 1 or adapter.sizes[before] <= max_cost
        outputs.extend(new)

    for what, name, items in operations:
        if what in ("feed", "final") and name in open_:
            fed[name] += len(items)
            feed(engine, name, *items, final=what == "final")
            open_ -= {name} if what == "final" else set()
        elif what == "cancel":
            engine.cancel(name)
            cancelled.add(name)
            open_.discard(name)
        elif what == "pause":
            engine.pause(name)
            paused.add(name)
        elif what == "resume":
            engine.resume(name)
            paused.discard(name)
        elif what == "step":
            step()
    for name in fed:
        engine.resume(name)
    paused.clear()
    while engine.has_work():
        step()

    for name, count in fed.items():
        numbers = [output.payload["number"] for output in outputs if output.request_id == name and output.payload]
        assert numbers == list(range(len(numbers)))
        if name not in cancelled:
            assert len(numbers) == count
            finished = [output.finished for output in outputs if output.request_id == name]
            assert any(finished) == (name not in open_)
            assert finished[:-1] == [False] * len(finished[:-1])
    assert sorted(adapter.ended) == sorted(set(adapter.ended))
    assert set(adapter.ended) == set(fed) - open_


@given(st.lists(st.tuples(NAME, ITEM), min_size=1, max_size=30), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_no_item_waits_for_more_calls_than_there_were_items_before_it(
    items: list[tuple[str, dict[str, Any]]], max_batch: int
) -> None:
    engine = ModuleEngine(Echo(), ModuleConfig(max_batch))
    for index in range(5):
        engine.add(request(f"r{index}"))
    place: dict[tuple[str, int], int] = {}
    count = dict.fromkeys([f"r{index}" for index in range(5)], 0)
    for age, (name, item) in enumerate(items):
        feed(engine, name, item, final=False)
        place[name, count[name]] = age
        count[name] += 1
    calls = 0
    while engine.has_work():
        for output in engine.step():
            assert calls <= place[output.request_id, output.payload["number"]]
        calls += 1


def test_a_call_takes_the_oldest_items_of_one_bucket_from_many_requests() -> None:
    adapter = Echo()
    engine = ModuleEngine(adapter, ModuleConfig(max_batch=3))
    for name, bucket in (("a", 1), ("b", 2), ("c", 1), ("d", 1), ("e", 1)):
        engine.add(request(name))
        feed(engine, name, {"bucket": bucket})
    drain(engine)
    assert adapter.calls == [["a", "c", "d"], ["b"], ["e"]]


def test_ordered_items_of_a_request_never_share_a_call_and_others_do() -> None:
    adapter = Echo()
    engine = ModuleEngine(adapter)
    engine.add(request("a"))
    engine.add(request("b"))
    feed(engine, "a", {}, {}, {})
    feed(engine, "b", {"ordered": False}, {"ordered": False})
    drain(engine)
    assert adapter.calls == [["a", "b", "b"], ["a"], ["a"]]


def test_max_cost_bounds_a_call_and_a_dearer_item_runs_alone() -> None:
    adapter = Echo()
    engine = ModuleEngine(adapter, ModuleConfig(max_cost=4))
    for name, cost in (("a", 9), ("b", 3), ("c", 2), ("d", 1)):
        engine.add(request(name))
        feed(engine, name, {"cost": cost})
    drain(engine)
    assert adapter.calls == [["a"], ["b", "d"], ["c"]]


def test_a_raised_call_fails_only_the_guilty_request() -> None:
    adapter = Echo()
    engine = ModuleEngine(adapter)
    for name in "abc":
        engine.add(request(name))
        feed(engine, name, {"poison": name == "b"})
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["a"].payload == outputs["c"].payload == {"number": 0}
    error = outputs["b"].error
    assert isinstance(error, StageFailed)
    assert error.stage == "stage"
    assert "RuntimeError: poison" in error.message
    assert engine.stats()["retries_total"] == 1
    assert not engine.has_work()
    assert sorted(adapter.ended) == ["a", "b", "c"]


def test_what_follows_a_failed_item_of_the_same_call_is_dropped() -> None:
    engine = ModuleEngine(Echo())
    engine.add(request("a"))
    feed(engine, "a", {"refuse": True}, {"ordered": False}, {})
    outputs = drain(engine)
    assert [output.request_id for output in outputs] == ["a"]
    assert isinstance(outputs[0].error, StageFailed)


def test_a_chunk_that_cannot_be_taken_fails_its_request_at_the_next_step() -> None:
    engine = ModuleEngine(Echo())
    engine.add(request("a"))
    engine.feed("a", "up", {"broken": True}, final=False)
    engine.feed("a", "up", {"items": [{}]}, final=True)  # ignored: it is gone
    assert engine.has_work()
    [output] = engine.step()
    assert isinstance(output.error, StageFailed)
    assert "broken chunk" in output.error.message
    assert engine.stats()["running"] == 0


def test_an_adapter_that_makes_no_last_item_does_not_leave_its_request_waiting() -> None:
    engine = ModuleEngine(Echo())
    engine.add(request("a"))
    feed(engine, "a")
    [output] = drain(engine)
    assert output.finished
    assert isinstance(output.error, StageFailed)
    assert "last item" in output.error.message


def test_a_request_ends_when_its_last_item_is_out_however_many_upstreams_it_had() -> None:
    engine = ModuleEngine(Echo())
    engine.add(request("a", frozenset({"up", "side"})))
    engine.feed("a", "side", {"items": []}, final=True)
    feed(engine, "a", {})
    [output] = drain(engine)
    assert output.finished
    assert output.finish_reason == "stop"


def test_a_stage_without_upstreams_runs_on_the_request_itself() -> None:
    engine = ModuleEngine(Echo())
    engine.add(request("a", frozenset()))
    [output] = drain(engine)
    assert output.finished


def test_paused_requests_wait_and_cancelled_ones_are_forgotten() -> None:
    adapter = Echo()
    engine = ModuleEngine(adapter)
    for name in "ab":
        engine.add(request(name))
        feed(engine, name, {})
    engine.pause("a")
    engine.cancel("b")
    assert not engine.has_work()
    assert engine.step() == []
    engine.resume("a")
    assert [output.request_id for output in drain(engine)] == ["a"]
    for call in (engine.cancel, engine.pause, engine.resume):
        call("unknown")
    engine.feed("b", "up", {"items": [{}]}, final=True)
    assert not engine.has_work()
    assert adapter.ended == ["b", "a"]


def test_a_failure_is_not_reported_after_cancel() -> None:
    engine = ModuleEngine(Echo())
    engine.add(request("a"))
    engine.feed("a", "up", {"broken": True}, final=False)
    engine.cancel("a")
    assert not engine.has_work()


def test_requests_that_cannot_run_and_double_ids_are_refused() -> None:
    engine = ModuleEngine(Echo())
    with pytest.raises(InvalidRequest, match="never run"):
        engine.add(request("never"))
    assert engine.stats()["running"] == 0
    engine.add(request("a"))
    with pytest.raises(InvalidRequest, match="already"):
        engine.add(request("a"))


def test_an_adapter_that_miscounts_its_results_fails_the_requests_and_not_the_engine() -> None:
    class Short(Echo):
        def run(self, works: list[Work]) -> list[Result]:
            return []

    engine = ModuleEngine(Short())
    engine.add(request("a"))
    feed(engine, "a", {})
    [output] = engine.step()
    assert "0 results for 1 items" in output.error.message


def test_stats_count_what_waits_and_what_ran() -> None:
    engine = ModuleEngine(Echo(), ModuleConfig(max_batch=2))
    for name in "abc":
        engine.add(request(name))
        feed(engine, name, {})
    assert engine.stats()["waiting"] == 3
    engine.step()
    stats = engine.stats()
    assert (stats["waiting"], stats["running"], stats["batch"], stats["calls_total"]) == (1, 1, 2, 1)


@pytest.mark.parametrize("limits", [{"max_batch": 0}, {"max_cost": 0}])
def test_impossible_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ModuleConfig(**limits)


def test_a_chunk_waits_until_its_items_have_run_and_one_without_items_does_not() -> None:
    engine = ModuleEngine(Echo(), ModuleConfig(max_batch=1))
    engine.add(request("r"))
    assert engine.backlog("r") == engine.backlog("unknown") == 0
    feed(engine, "r", {}, {}, final=False)
    feed(engine, "r", final=False)  # kept by the adapter until more comes: its upstream must be able to send more
    feed(engine, "r", {}, final=True)
    seen = [engine.backlog("r")]
    while engine.has_work():
        engine.step()
        seen.append(engine.backlog("r"))
    assert seen == [2, 2, 1, 0]


def test_warming_up_is_the_adapters_and_counts_as_no_call() -> None:
    adapter = Echo()
    engine = ModuleEngine(adapter)
    before = engine.stats()
    engine.warm_up()
    assert adapter.calls == [[]]
    assert engine.stats() == before
    assert not engine.has_work()


# --- audio that somebody listens to ----------------------------------------------------------------------------------


class Clock:
    """Time that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def listened(clock: Clock, names: str, *seconds: float, **limits: int) -> tuple[ModuleEngine, Echo]:
    """An engine with streams whose pieces begin at these seconds."""
    model = Echo()
    engine = ModuleEngine(model, ModuleConfig(**limits), clock=clock)
    for name in names:
        engine.add(request(name))
        engine.feed(name, "up", {"items": [{"played_at": at} for at in seconds]}, final=False)
    return engine, model


def test_a_first_piece_goes_before_those_of_listeners_who_still_have_some() -> None:
    clock = Clock()
    engine, model = listened(clock, "ab", 0.0, 1.0, 2.0)
    engine.step()
    assert model.calls == [["a", "b"]]
    engine.add(request("c"))
    engine.feed("c", "up", {"items": [{"played_at": 0.0}, {"played_at": 1.0}]}, final=False)
    clock.now = 0.5
    engine.step()
    assert model.calls[1:] == [["c"]]  # without the pieces that a and b need in half a second
    while engine.has_work():
        engine.step()
    assert model.calls[2:] == [["a", "b", "c"], ["a", "b"]]


def test_pieces_are_in_the_order_in_which_listeners_need_them() -> None:
    clock = Clock()
    engine, model = listened(clock, "a", 0.0, 4.0, 8.0, max_batch=1)
    engine.step()  # a plays since 0
    clock.now = 3.0
    engine.add(request("b"))
    engine.feed("b", "up", {"items": [{"played_at": 0.0}, {"played_at": 2.0}]}, final=False)
    while engine.has_work():
        engine.step()
    assert model.calls == [["a"], ["b"], ["a"], ["b"], ["a"]]  # needed at: b at once, a 4, b 5, a 8


def test_first_pieces_share_a_call_up_to_a_number_of_their_own() -> None:
    clock = Clock()
    engine, model = listened(clock, "abc", 0.0, 1.0, max_batch=3, max_first=1)
    while engine.has_work():
        engine.step()
    assert model.calls == [["a"], ["b"], ["c"], ["a", "b", "c"]]


def test_a_call_waits_for_a_number_of_items_but_not_for_long() -> None:
    clock, woken = Clock(), Event()
    model = Echo()
    engine = ModuleEngine(model, ModuleConfig(max_batch=3, min_batch=3, batch_wait=0.01), woken.set, clock)
    for name in "ab":
        engine.add(request(name))
        engine.feed(name, "up", {"items": [{}]}, final=False)
    assert not engine.has_work()
    assert engine.step() == []
    assert woken.wait(60)  # by a clock of its own: the loop looks again
    assert not engine.has_work()
    clock.now = 0.01
    assert engine.has_work()
    engine.step()
    for name in "abc":
        if name == "c":
            engine.add(request(name))
        engine.feed(name, "up", {"items": [{}]}, final=False)
    engine.step()
    assert model.calls == [["a", "b"], ["a", "b", "c"]]
    engine.feed("a", "up", {"items": [{"played_at": 0.0}]}, final=False)
    assert engine.has_work()  # a listener waits for nobody


def test_more_than_the_largest_batch_cannot_be_waited_for() -> None:
    with pytest.raises(ConfigError, match="min_batch is 3; it must be from 1 to max_batch, 2"):
        ModuleConfig(max_batch=2, min_batch=3)
