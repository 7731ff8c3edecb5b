"""Requests of every kind side by side, in little room, with pauses, cancellations and failures between them: each gets
what it gets alone, and the state is consistent after every step."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from ar_adapter import Driver, Result, branch, prompts, stage_request, tiny_model
from ar_windowed import tiny
from ar_words import WordAdapter
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.engines.autoregressive.speculation.drafter import Computed, Drafter, Wanted
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.messages.errors import StageFailed
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams, StructuredOutput

TEXT = frozenset({"text"})
HEADS = prompts(3, (24, 16, 9), seed=5)
"""What prompts may begin with, so that they meet in the prefix cache."""
FORMS = [
    StructuredOutput(regex="(yes|no) [0-9]{2,9}!"),
    StructuredOutput(choice=["say", "saying", "a true one"]),
    StructuredOutput(json={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}),
]
MOST = 14


class SeenWords(WordAdapter):
    """Gives its states to later stages, too; its grammars are compiled once."""

    def __init__(self, model: PreTrainedModel, windows: tuple[int | None, ...] = ()) -> None:
        super().__init__(model)
        self.kv = replace(self.kv, capture_width=model.config.hidden_size, windows=windows)
        there = threading.Event()
        self.grammars = Grammars.of(self, there.set)
        for form in FORMS:
            asked = self.grammars.ask(stage_request("it", sampling=SamplingParams(structured_outputs=form)))
            while asked is not None and not asked.done:
                assert there.wait(120)
                there.clear()


@pytest.fixture(scope="module")
def full() -> SeenWords:
    return SeenWords(tiny_model("qwen2", seed=7, vocab_size=110))


@pytest.fixture(scope="module")
def hybrid() -> SeenWords:
    """With layers that see a window only."""
    model = tiny("gemma 3", vocab_size=110)
    kinds = model.config.layer_types
    return SeenWords(model, tuple(11 if kind == "sliding_attention" else None for kind in kinds))


@dataclass(frozen=True)
class Case:
    """A request, and what happens to it."""

    head: int
    tail: int
    seed: int
    sampling: tuple[tuple[str, Any], ...]
    rows: bool
    """A later stage wants its states; then it has one output."""
    resumed: tuple[int, ...]
    """How many tokens of each output an earlier attempt had made."""
    arrival: int
    pause: tuple[int, int]
    """(from this step on, for so many)"""
    cancelled: int | None
    priority: int
    tenant: str

    @property
    def prompt(self) -> list[int]:
        return [*HEADS[self.head], *prompts(1, [self.tail], seed=100 + self.tail)[0]]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**dict(self.sampling))

    @property
    def outputs(self) -> int:
        return self.params.n or 1

    @property
    def branches(self) -> int:
        return max(self.outputs, self.params.best_of or 1, self.params.beam_width or 1)


PLAIN = {
    "temperature": st.sampled_from([0.0, 0.7, 1.5]),
    "max_tokens": st.sampled_from([MOST, MOST, 6, 2, 1]),
    "top_k": st.sampled_from([0, 1, 20]),
    "top_p": st.sampled_from([0.6, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 1.4]),
    "frequency_penalty": st.sampled_from([0.0, 0.9]),
    "min_tokens": st.sampled_from([0, 1]),
    "stop_token_ids": st.sampled_from([[], [], [3, 9, 27, 61, 80]]),
    "stop": st.sampled_from([[], ["a"], ["e", "tr", "ab"]]),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.sampled_from([True, True, False]),
    "bad_words": st.sampled_from([[], ["a", "true", "bc"]]),
    "suppress_tokens": st.sampled_from([[], [5, 70]]),
    "speculate": st.sampled_from([True, True, False]),
}
TOLD = {"logprobs": st.sampled_from([None, 0, 2]), "prompt_logprobs": st.sampled_from([None, 1])}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["plain", "n", "best_of", "beams", "form"]))
    given_here = {name: draw(values) for name, values in PLAIN.items()}
    if kind == "beams":
        given_here |= {"temperature": 0.0, "bad_words": [], "beam_width": draw(st.integers(2, 4))}
        given_here["n"] = draw(st.integers(1, given_here["beam_width"]))
        given_here["prompt_logprobs"] = draw(TOLD["prompt_logprobs"])
    else:
        given_here |= {name: draw(values) for name, values in TOLD.items()}
    if kind == "form":
        # what is forbidden besides might leave nothing to choose
        given_here |= {"structured_outputs": draw(st.sampled_from(FORMS)), "suppress_tokens": [], "bad_words": []}
        given_here |= {"min_tokens": 0, "stop_token_ids": []}
    if kind in ("n", "form"):
        given_here["n"] = draw(st.integers(1, 4))
    if kind == "best_of":
        given_here |= {"n": draw(st.integers(1, 2)), "best_of": draw(st.integers(2, 4))}
    given_here["min_tokens"] = min(given_here["min_tokens"], given_here["max_tokens"])
    outputs = given_here.get("n") or 1
    return Case(
        head=draw(st.integers(0, len(HEADS) - 1)),
        tail=draw(st.integers(1, 5)),
        seed=draw(st.sampled_from([0, 5, 2**63, 2**64 - 2])),
        sampling=tuple(given_here.items()),
        rows=kind == "plain" and draw(st.booleans()),
        resumed=tuple(draw(st.integers(0, MOST)) for _ in range(outputs)) if draw(st.booleans()) else (),
        arrival=draw(st.sampled_from([0, 0, 1, 2, 5, 11])),
        pause=(draw(st.integers(0, 25)), draw(st.sampled_from([0, 0, 1, 6]))),
        cancelled=draw(st.sampled_from([None] * 6 + [0, 1, 3, 6, 12, 20])),
        priority=draw(st.integers(0, 1)),
        tenant=draw(st.sampled_from("ab")),
    )


@dataclass(frozen=True)
class House:
    """Where they are served."""

    config: dict[str, Any]
    spare: int
    """Blocks beyond what the largest of them needs."""
    drafter: str
    failing: int | None
    """In this step the device fails."""
    ahead: bool = False
    """Steps are dispatched before the previous ones complete."""


HOUSES = st.builds(
    House,
    config=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([8, 3, 1]),
            "max_batch": st.integers(4, 9),
            "max_tokens_per_step": st.sampled_from([4, 7, 30, 200]),
            "prefill_chunk": st.sampled_from([None, 1, 8]),
            "prefix_caching": st.booleans(),
            "scheduling": st.sampled_from(["priority", "fcfs", "fair"]),
        }
    ),
    spare=st.sampled_from([0, 1, 3, 200]),
    drafter=st.sampled_from(["oracle", "oracle", "ngram", "none"]),
    failing=st.sampled_from([None] * 6 + [0, 2, 5, 9, 14]),
)


class Oracle:
    """Drafts what each sequence says alone, except at one place of four."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        self.known = known
        self.random = random.Random(1)

    def rows(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None

    def observe(self, computed: Sequence[Computed]) -> None:
        raise AssertionError("it wants no rows")

    def propose(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        return [self._guess(entry) for entry in wanted]

    def _guess(self, entry: Wanted) -> list[int]:
        future = self.known.get(entry.key, [])[entry.generated :][: entry.most]
        return [token if self.random.random() < 0.75 else (token + 1) % 110 for token in future]

    def forget(self, key: str) -> None:
        pass

    def audit(self) -> None:
        pass


@dataclass
class Served:
    """An engine with requests that come, pause and go."""

    adapter: SeenWords
    config: dict[str, Any]
    drafter: Drafter | None = None
    ahead: bool = False
    drive: Driver = field(init=False)

    def __post_init__(self) -> None:
        sizes = AutoregressiveConfig(**self.config)
        speculation = None if self.drafter is None else Speculation(self.drafter, 3, adaptive=False)
        self.drive = Driver(
            AutoregressiveEngine(self.adapter, sizes, self.adapter.grammars, speculation, ahead=self.ahead)
        )

    def add(self, name: str, case: Case, known: Sequence[Sequence[int]] = ()) -> None:
        request = stage_request(
            name,
            sampling=case.params,
            seed=case.seed,
            to_client=TEXT,
            downstreams=frozenset({"next"}) if case.rows else frozenset(),
            priority=case.priority,
            arrival=float(case.arrival),
            resume=list(known[0]) if known else [],
            resume_others=[list(ids) for ids in known[1:]],
        )
        request.request = Request(request_id=name, tenant=case.tenant)
        self.drive.add(request, case.prompt)


ALONE: dict[tuple[int, Case], list[Result]] = {}


def alone(adapter: SeenWords, case: Case) -> list[Result]:
    """What it gets where nothing else happens."""
    bare = replace(case, resumed=(), arrival=0, pause=(0, 0), cancelled=None, priority=0, tenant="a")
    key = (id(adapter), replace(bare, sampling=tuple((name, str(value)) for name, value in bare.sampling)))
    if key not in ALONE:
        served = Served(adapter, {"num_blocks": 400, "block_size": 8, "prefix_caching": False})
        served.add("it", bare)
        served.drive.run()
        ALONE[key] = [served.drive.results[branch("it", index)] for index in range(case.outputs)]
    return ALONE[key]


def need(case: Case, config: dict[str, Any], groups: int) -> int:
    """Blocks it needs when all its branches are at their ends."""
    size = config["block_size"]
    length, count = len(case.prompt) + MOST, case.branches if case.params.beam_width else 1
    return groups * count * (-(-length // size) + 1)


def told(result: Result) -> list[tuple[Any, ...]]:
    return [(entry.chosen.token_id, entry.chosen.logprob) for out in result.outputs for entry in out.logprobs]


def same(case: Case, index: int, got: Result, expected: Result, *, resumed: bool) -> None:
    """All that is said of one output is what is said of it alone."""
    assert got.last.finished
    assert got.token_ids == expected.token_ids
    assert got.text == expected.text
    assert (got.last.finish_reason, got.last.stop_reason) == (expected.last.finish_reason, expected.last.stop_reason)
    for found, right in zip(told(got), told(expected)[-len(told(got)) :], strict=True):
        assert found == pytest.approx(right, abs=1e-4)
    if not resumed:
        assert len(told(got)) == len(told(expected))
        assert got.last.cumulative_logprob == pytest.approx(expected.last.cumulative_logprob, abs=1e-3)
        if index == 0:
            assert _of_prompt(got) == pytest.approx(_of_prompt(expected), abs=1e-4)
    if case.rows:
        torch.testing.assert_close(got.rows(), expected.rows(), rtol=1e-4, atol=1e-4)


def _of_prompt(result: Result) -> list[float]:
    entries = [entry for out in result.outputs for entry in out.prompt_logprobs]
    return [entry.chosen.logprob for entry in entries if entry is not None]


def sequences(name: str, results: Iterable[Result]) -> dict[str, list[int]]:
    return {f"{name}\0{index}" if index else name: result.token_ids for index, result in enumerate(results)}


def serve_and_compare(adapter: SeenWords, house: House, wanted: list[Case]) -> None:
    groups = adapter.kv.layout(adapter.max_model_len).groups
    expected = [alone(adapter, case) for case in wanted]
    blocks = max(need(case, house.config, groups) for case in wanted) + house.spare
    drafter: Drafter | None = None
    if house.drafter == "ngram":
        drafter = NgramDrafter(1, 3)
    elif house.drafter == "oracle":
        known: dict[str, list[int]] = {}
        for number, results in enumerate(expected):
            known |= sequences(f"r{number}", results)
        drafter = Oracle(known)
    served = Served(adapter, {**house.config, "num_blocks": blocks}, drafter, house.ahead)
    engine = served.drive.engine
    gone: set[int] = set()
    for now in range(45):
        for number, case in enumerate(wanted):
            name = f"r{number}"
            if case.arrival == now:
                done = [expected[number][i].token_ids[:count] for i, count in enumerate(case.resumed)]
                served.add(name, case, done)
            if case.arrival <= now and case.pause[1]:
                (engine.pause if case.pause[0] <= now < sum(case.pause) else engine.resume)(name)
            if case.cancelled == now and case.arrival <= now:
                engine.cancel(name)
                gone.add(number)
        adapter.fail_next = house.failing == now
        served.drive.step()
    adapter.fail_next = False
    served.drive.run()
    stats = engine.stats()
    assert stats["blocks_used"] == 0
    assert not engine.has_work()
    for number, (case, results) in enumerate(zip(wanted, expected, strict=True)):
        got = [served.drive.results.get(branch(f"r{number}", index)) for index in range(case.outputs)]
        errors = [out.error for result in got if result for out in result.outputs if out.error is not None]
        if errors:
            assert house.failing is not None
            assert all(isinstance(error, StageFailed) for error in errors), errors
            event("failed with its batch")
            continue
        for index, (result, right) in enumerate(zip(got, results, strict=True)):
            if number in gone and not (result and result.last.finished):
                event("cancelled under way")
                assert result is None or result.token_ids == right.token_ids[: len(result.token_ids)]
                continue
            assert result is not None
            same(case, index, result, right, resumed=any(case.resumed))
    for name in ("preemptions_total", "spec_accepted_tokens_total", "prefix_hit_tokens_total"):
        event(f"{name} > 0: {stats[name] > 0}")


MIXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(MIXED, max_examples=30)
@given(house=HOUSES, wanted=st.lists(cases(), min_size=1, max_size=8))
def test_each_gets_what_it_gets_alone(full, house, wanted):
    serve_and_compare(full, house, wanted)


@pytest.mark.nightly
@settings(MIXED, max_examples=30)
@given(house=HOUSES, wanted=st.lists(cases(), min_size=1, max_size=8))
def test_with_windows(hybrid, house, wanted):
    serve_and_compare(hybrid, house, wanted)
