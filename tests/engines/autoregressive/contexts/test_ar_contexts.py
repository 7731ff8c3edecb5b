"""Contexts are lent whole and stay as they are until they are given back; everything beside them finishes and gives
what it gives alone, however small the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from ar_adapter import Driver, prompts, stage_request, tiny_model
from ar_open import END, HOLD, OpenAdapter, answer
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contexts.contract import Contexts, View
from segue.engines.autoregressive.contexts.engine import ContextEngine
from segue.engines.autoregressive.contract import Prompt
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import Payload, StageRequest
from segue.messages.errors import InvalidRequest, TooLong
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams

SIZE = 4
TEXT = prompts(1, (64,))[0]


@dataclass
class Asked:
    """The reading of a request: its sequences, after some thoughts."""

    sequences: list[list[int]] = field(default_factory=list)
    thinks: bool = False

    def feed(self, upstream: str, payload: Payload, *, final: bool) -> bool:
        self.sequences, self.thinks = payload["sequences"], payload["thinks"]
        return final

    def visited(self) -> None:
        """Nothing: a request is visited once."""

    def thoughts(self) -> Prompt | None:
        return Prompt(self.sequences[0]) if self.thinks else None

    def contexts(self, thoughts: Any) -> Contexts:
        first = [*self.sequences[0], *thoughts]
        whole = [first, *self.sequences[1:]]
        views = [View(number, len(ids), len(ids)) for number, ids in enumerate(whole)]
        return Contexts([Prompt([*ids, 0]) for ids in whole], [*views, View(0, len(first) // 2, 0)])


class Reader(OpenAdapter):
    """Requests with a receiver read contexts."""

    def reading(self, request: StageRequest) -> Asked | None:
        return Asked() if request.downstreams else None


@cache
def model() -> Reader:
    return Reader(tiny_model())


def engine_of(blocks: int, *, ahead: bool = False, **config: Any) -> ContextEngine:
    given = AutoregressiveConfig(**{"num_blocks": blocks, "block_size": SIZE, **config})
    return ContextEngine(AutoregressiveEngine(model(), given, ahead=ahead), model())


@cache
def lone() -> Driver:
    return Driver(engine_of(64, prefix_caching=False))  # type: ignore[arg-type]


def keys_of(engine: ContextEngine, blocks: list[int], length: int) -> torch.Tensor:
    """[layers, length, heads, dim]"""
    table = torch.tensor(blocks)
    return torch.stack([engine.store.read(layer, table, 1)[0][0, :, :length] for layer in range(3)])


def expected_keys(ids: list[int]) -> torch.Tensor:
    engine = lone().engine
    ask(engine, "r", [ids])
    lease = run(engine)["r"].payload["lease"]
    keys = keys_of(engine, list(engine.blocks(lease, View(0, len(ids), 0))), len(ids))
    engine.release(lease)
    return keys


def ask(engine: ContextEngine, name: str, sequences: list[list[int]], *, thinks: bool = False, **more: Any) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    engine.add(stage_request(name, downstreams=frozenset({"other"}), sampling=sampling, **more))
    engine.feed(name, "input", {"sequences": sequences, "thinks": thinks}, final=True)


def run(engine: ContextEngine) -> dict[str, Any]:
    made = {}
    while engine.has_work():
        for output in engine.step():
            made[output.request_id] = output
        engine.audit()
    return made


words = st.integers(1, 26).flatmap(lambda length: st.integers(0, 20).map(lambda start: TEXT[start : start + length]))
scheduled = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.just("reads"),
            "sequences": st.lists(words, min_size=1, max_size=2),
            "thinks": st.booleans(),
            "keeps": st.integers(0, 6),
            "leaves": st.sampled_from([None, None, None, 2, 5]),
        }
    ),
    st.fixed_dictionaries({"kind": st.just("replies"), "prompt": words, "most": st.integers(1, 14)}),
    st.fixed_dictionaries({"kind": st.just("holds"), "prompt": words}),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), scheduled), min_size=1, max_size=7),
    st.integers(0, 6),
    st.integers(1, 4),
    st.sampled_from(["fcfs", "fair", "priority"]),
    st.booleans(),
)
def test_whatever_is_beside_them(wanted, spare, max_batch, scheduling, ahead) -> None:
    """`wanted`: (step at which it comes, what it is), in a pool that just holds the largest of them."""
    largest = max(_need(one) for _, one in wanted)
    engine = engine_of(largest + spare, ahead=ahead, max_batch=max_batch, scheduling=scheduling, max_tokens_per_step=16)
    later = sorted(enumerate(wanted), key=lambda entry: entry[1][0])
    replies: dict[str, list[int]] = {}
    lent: dict[str, tuple[int, int, list[View], torch.Tensor]] = {}
    done: set[str] = set()
    for step in range(1000):
        while later and later[0][1][0] <= step:
            number, (_, one) = later.pop(0)
            _begin(engine, f"{one['kind']}{number}", one)
        for name in [name for name, (end, *_) in lent.items() if end <= step]:
            _, lease, views, keys = lent.pop(name)
            now = keys_of(engine, list(engine.blocks(lease, views[0])), views[0].length)
            assert torch.equal(now, keys), "lent keys have changed"
            engine.release(lease)
        for number, (_, one) in enumerate(wanted):
            if one.get("leaves") == step:
                name = f"reads{number}"
                engine.cancel(name)
                lent.pop(name, None)
                done.add(name)
        if not engine.has_work() and not later and not lent:
            break
        for output in engine.step():
            assert output.error is None
            name = output.request_id
            replies.setdefault(name, []).extend(output.token_ids)
            if output.finished:
                done.add(name)
            if output.payload is not None:
                one = wanted[int(name.removeprefix("reads"))][1]
                lease, views = output.payload["lease"], [View(*view) for view in output.payload["views"]]
                ids = [*one["sequences"][0], *replies[name]]
                keys = keys_of(engine, list(engine.blocks(lease, views[0])), views[0].length)
                torch.testing.assert_close(keys, expected_keys(ids), rtol=1e-4, atol=1e-4)
                lent[name] = (step + one["keeps"], lease, views, keys)
        engine.audit()
    else:
        raise AssertionError(f"still at work: {engine.stats()}")
    for number, (_, one) in enumerate(wanted):
        name = f"{one['kind']}{number}"
        if one["kind"] == "holds":
            engine.cancel(name)
        elif one["kind"] == "replies":
            sampling = SamplingParams(temperature=0.0, max_tokens=one["most"])
            assert replies[name] == answer(lone(), one["prompt"], sampling)
        elif one["leaves"] is None:
            assert name in done
    assert engine.stats()["blocks_used"] == 0


def _need(one: dict[str, Any]) -> int:
    if one["kind"] == "reads":
        lengths = [len(ids) + 2 for ids in one["sequences"]]
        lengths[0] += 3 if one["thinks"] else 0
        return sum(-(-length // SIZE) for length in lengths)
    return -(-(len(one["prompt"]) + one.get("most", 1)) // SIZE)


def _begin(engine: ContextEngine, name: str, one: dict[str, Any]) -> None:
    if one["kind"] == "reads":
        ask(engine, name, one["sequences"], thinks=one["thinks"])
        return
    holds = one["kind"] == "holds"
    sampling = SamplingParams(temperature=0.0, max_tokens=one.get("most"))
    engine.add(stage_request(name, sampling=sampling, request=Request(request_id=name, open=holds)))
    engine.feed(name, "input", {"prompt": Prompt(one["prompt"]), "then": HOLD if holds else END}, final=not holds)


def test_requests_wait_until_all_that_is_lent_fits() -> None:
    engine = engine_of(10)
    ask(engine, "one", [TEXT[:15], TEXT[20:31]])  # 4 + 3 blocks
    ask(engine, "two", [TEXT[:15]])
    made = run(engine)
    assert made.keys() == {"one"}
    assert (engine.stats()["contexts_lent"], engine.stats()["contexts_waiting"]) == (1, 1)
    engine.release(made["one"].payload["lease"])
    made = run(engine)
    assert made.keys() == {"two"}
    lease = made["two"].payload["lease"]
    for _ in range(2):
        engine.release(lease)
    assert engine.stats()["blocks_used"] == 0
    with pytest.raises(KeyError):
        engine.blocks(lease, View(0, 3, 0))


def test_a_new_attempt_ends_the_lease_of_the_old_one() -> None:
    engine = engine_of(10)
    ask(engine, "r", [TEXT[:15]])
    old = run(engine)["r"].payload["lease"]
    ask(engine, "r", [TEXT[:15]])
    new = run(engine)["r"].payload["lease"]
    engine.release(old)  # as the one that read from it ends, later
    assert len(engine.blocks(new, View(0, 15, 0))) == 4
    engine.cancel("r")  # all that a worker does for a request that is dropped
    assert engine.stats()["blocks_used"] == 0


def test_lent_blocks_do_not_expire() -> None:
    now = [0.0]
    given = AutoregressiveConfig(num_blocks=20, block_size=SIZE, hold_seconds=5.0)
    engine = ContextEngine(AutoregressiveEngine(model(), given, clock=lambda: now[0]), model())
    ask(engine, "r", [TEXT[:15]])
    lease = run(engine)["r"].payload["lease"]
    for now[0] in (1.0, 100.0, 200.0):
        engine.add(stage_request(f"reply{now[0]}", sampling=SamplingParams(max_tokens=2)))
        engine.feed(f"reply{now[0]}", "input", {"prompt": Prompt(TEXT[30:40])}, final=True)
        run(engine)
    assert len(engine.blocks(lease, View(0, 15, 0))) == 4


def test_what_cannot_be_read_is_refused() -> None:
    engine = engine_of(6)
    ask(engine, "r", [TEXT[:15], TEXT[20:31]])
    assert isinstance(run(engine)["r"].error, TooLong)
    ask(engine, "r", [TEXT[:3]])
    with pytest.raises(InvalidRequest, match="running already"):
        ask(engine, "r", [TEXT[:3]])
