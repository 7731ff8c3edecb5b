"""`segue bench text`: the same work for every side, loads as they are named, figures that follow from the outcomes."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.bench import figures as pages
from segue.bench.harness.hardware import Machine
from segue.bench.harness.load import closed, poisson
from segue.bench.harness.results import measure, read_values, result_of, write_result
from segue.bench.harness.stats import summary
from segue.bench.main import parser
from segue.bench.text.arguments import TextBench
from segue.bench.text.report import markdown, plot
from segue.bench.text.results import Scenario, TextResult, TextSettings, keeps, side_of
from segue.bench.text.text import Run, Sides
from segue.bench.text.workload import (
    Shape,
    TextOutcome,
    TextRequest,
    TextSlice,
    WrongLength,
    intrude,
    requests,
)

VOCAB = 1000


def outcome(request: TextRequest, speed: float = 1.0, tokens: int | None = None) -> TextOutcome:
    count = request.tokens if tokens is None else tokens
    times = [speed * (1 + 0.1 * number) for number in range(count)]
    return TextOutcome(index=request.index, times=times, jct=times[-1], token_ids=request.prompt)


class Side:
    """Answers at once, one event-loop turn later."""

    startup = 0.5

    def __init__(self, name: str, tokens: int | None = None) -> None:
        self.name = name
        self._tokens = tokens
        self.seen: list[int] = []
        self.standing = False

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def take_over(self, together: int) -> None:
        self.standing = False

    async def hand_over(self) -> None:
        self.standing = True

    def processes(self) -> dict[int, str]:
        return {os.getpid(): "all"}

    async def run(self, request: TextRequest) -> TextOutcome:
        assert not self.standing, "it is not its turn"
        self.seen.append(request.index)
        await asyncio.sleep(0)
        return outcome(request, tokens=self._tokens)


@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from([0.0, 0.25, 0.8, 1.0]), st.integers(2, 2000))
def test_requests_are_the_same_for_everybody_and_share_what_they_should(prompt, count, share, vocab) -> None:
    shape = Shape(prompt, 5, share)
    made = requests(shape, 7, count, vocab, seed=3)
    assert made == requests(shape, 7, count, vocab, seed=3)
    common = round(share * prompt)
    for one in made:
        assert len(one.prompt) == prompt
        assert one.prompt[:common] == made[0].prompt[:common]
        assert all(0 <= token < vocab for token in one.prompt)
    assert {one.index for one in made} == set(range(7, 7 + count))
    equal = requests(Shape(prompt, 5), 7, count, vocab, seed=3, equal=True)
    assert all(one.prompt == equal[0].prompt for one in equal)


def test_prompts_differ_by_index_shape_and_seed() -> None:
    base = requests(Shape(50, 5), 0, 2, VOCAB, seed=0)
    others = [*requests(Shape(51, 5), 0, 1, VOCAB, seed=0), *requests(Shape(50, 5), 0, 1, VOCAB, seed=1)]
    assert len({tuple(one.prompt[:50]) for one in (*base, *others)}) == 4


def test_arrivals_come_at_the_rate() -> None:
    times = poisson(4.0, 4000, seed=1)
    assert times == sorted(times) == poisson(4.0, 4000, seed=1)
    assert 0.9 < times[-1] / 1000 < 1.1


def test_an_answer_of_another_length_stops_the_benchmark() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(closed(1)(Side("a", tokens=3), requests(Shape(4, 2), 0, 1, VOCAB, 0)))
    assert caught.group_contains(WrongLength, match="3 tokens came, 2 were asked for")


def test_figures_follow_from_the_outcomes() -> None:
    asked = requests(Shape(4, 5), 0, 2, VOCAB, 0)
    fast = [TextSlice("a", 2.0, [outcome(one) for one in asked])]
    slow = [TextSlice("b", 8.0, [outcome(one, 2.0) for one in asked])]
    figures = side_of(slow, fast, (2.0, 0.1))
    assert figures.tokens_per_second == 10 / 8
    assert figures.ttft.mean == 2.0
    assert figures.tpot.mean == pytest.approx(0.2)
    assert figures.itl is not None
    assert figures.itl.p99 == pytest.approx(0.2)
    assert (figures.goodput, figures.kept, figures.same_tokens) == (0.0, 0.0, 1.0)
    assert side_of(fast, fast, (2.0, 0.11)).goodput == 1.0
    assert side_of(fast, slow, ()).goodput is None
    assert not keeps(outcome(asked[0]), (0.5, 1.0))
    changed = [TextSlice("b", 8.0, [outcome(one) for one in requests(Shape(4, 5), 5, 2, VOCAB, 0)])]
    assert side_of(changed, fast, ()).same_tokens == 0.0


def test_gaps_are_those_while_the_long_prompt_was_read() -> None:
    """Tokens come at times after the request was sent, all of them before or after its answer is there."""

    class Slow(Side):
        async def run(self, request: TextRequest) -> TextOutcome:
            answer = await super().run(request)
            if request.tokens > 10:  # decoding: one gap begins before the long prompt and ends long after it
                answer.times = [-100.0] * (request.tokens - 1) + [500.0]
            return answer

    side = Slow("a")
    decoding = requests(Shape(4, 20), 0, 2, VOCAB, 0)
    [long] = requests(Shape(40, 1), 10, 1, VOCAB, 0)
    assert asyncio.run(intrude(side, decoding, long)) == pytest.approx([600.0, 600.0])
    assert side.seen[-1] == 10


def result() -> TextResult:
    asked = requests(Shape(4, 5), 0, 2, VOCAB, 0)
    own = {
        name: [TextSlice(name, wall, [outcome(one) for one in asked])] for name, wall in (("segue", 1.0), ("b", 3.0))
    }
    sides = {name: side_of(slices, own["segue"], (2.0, 0.2)) for name, slices in own.items()}
    scenario = Scenario(
        name="4/5, 2 clients", prompt=4, output=5, clients=2, objective=[2.0, 0.2], sides=sides, ratios={"b": 3.0}
    )
    return TextResult(
        finished="2026-01-02T00:00:00+00:00",
        machine=Machine("a cpu", 2, 2**34, [], "Linux", "3.11", {"torch": "2"}, (0.0, 0.0, 0.0)),
        settings=TextSettings(model="tiny", dtype="float32", seed=0, rounds=1, threads=1, preload="", vllm="1.0"),
        startup={"segue": 2.0, "b": 7.0},
        scenarios=[scenario],
        intrusion={"segue": summary([0.1, 0.2])},
        intrusion_prompt=900,
        crowds={"1 different": {"segue": 1.0, "b": 2.0}, "10 equal": {"segue": 1.5, "b": 9.0}},
    )


def test_the_report_has_every_figure(tmp_path) -> None:
    text = markdown(result())
    for part in ("3.00×", "| segue | 2.0 |", "| 10 equal | 1.50 | 9.00 |", "vllm 1.0", "900 tokens", "2.00 (100%)"):
        assert part in text, part
    plot(result(), tmp_path / "text.png")
    assert (tmp_path / "text.png").stat().st_size > 10_000


def test_a_run_that_is_stopped_leaves_the_levels_it_has_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Breaks(Side):
        async def run(self, request: TextRequest) -> TextOutcome:
            if len(request.prompt) == 900:  # of the intrusion, which is the last level
                raise RuntimeError("it broke")
            return await super().run(request)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some", "vocab_size": VOCAB}))
    path, kept = tmp_path / "text.json", []

    def keep(so_far: TextResult) -> None:
        write_result(so_far, path)
        kept.append(result_of(read_values(path), TextResult, path))

    bench = TextBench(
        model=tmp_path,
        shapes=[Shape(4, 2)],
        concurrency=[1, 2],
        rounds=1,
        baseline=["one"],
        quantized=["int8"],
        rates=[1000.0],
        arrivals=2,
        objective=(2.0, 0.2),
        shared_prefix=0.5,
        long_prompt=900,
        crowds=[1, 10],
        keep=keep,
        say=lambda line: None,
    )
    sides = Sides(Breaks("segue"), Side("segue with prefix cache"), None, {"one": Side("b")}, [Side("segue int8")])
    empty = msgspec.structs.replace(result(), finished="", scenarios=[], intrusion={}, crowds={})
    with pytest.raises(RuntimeError, match="it broke"):
        asyncio.run(measure(empty, Run(bench, sides, empty).levels(), bench.keep))
    assert [(one.done, one.planned) for one in kept] == [(number, 9) for number in range(1, 8)]
    assert [len(one.scenarios) for one in kept] == [1, 2, 3, 4, 4, 4, 4]
    assert list(kept[0].scenarios[0].sides) == ["segue", "segue int8", "b"]
    assert [len(one.crowds) for one in kept] == [0, 0, 0, 0, 1, 2, 3]
    assert kept[-1].intrusion == {}
    for one in kept:
        assert "Unfinished: " in markdown(one)
        assert one.finished
    plot(kept[0], tmp_path / "text.png")
    assert pages.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "Unfinished: 7 of 9 levels." in printed
    assert "### 4/2, 2 clients" in printed


def test_who_reads_a_result_while_it_is_written_reads_a_whole_one(tmp_path: Path) -> None:
    path, first = tmp_path / "text.json", result()
    write_result(first, path)
    with path.open("rb") as reader:
        write_result(msgspec.structs.replace(first, done=1), path)
        assert msgspec.json.decode(reader.read(), type=TextResult) == first
    assert result_of(read_values(path), TextResult, path).done == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--shapes", "128"], "must be a whole number above 0"),
        (["--objective", "2"], "must be two numbers"),
        (["--rates", "0"], "must be numbers above 0"),
        (["--baseline", "vllm"], "there is no baseline 'vllm'"),
    ],
)
def test_wrong_arguments_are_named(argv: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["text", *argv])
    assert said in capsys.readouterr().err


def test_the_defaults_are_the_benchmark_of_record() -> None:
    arguments: argparse.Namespace = parser().parse_args(["text"])
    assert [str(shape) for shape in arguments.shapes] == ["128/64", "1024/128"]
    assert arguments.concurrency == [1, 8, 32]
    assert arguments.baseline == ["one", "static", "continuous"]
