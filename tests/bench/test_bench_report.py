"""What is written of a result, and that it can be read again."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from bench_fakes import outcome, request

from segue.bench import figures as pages
from segue.bench.comparisons import comparison_table, headline_table, headlines, of_omni
from segue.bench.first_sound import sound_result
from segue.bench.harness.hardware import Machine, machine
from segue.bench.harness.meters import SideUsage
from segue.bench.harness.report import result_path, write_report
from segue.bench.harness.results import measure, read_values, result_of, write_result
from segue.bench.harness.scenarios import ratios
from segue.bench.harness.stages import StageFigures
from segue.bench.harness.stats import HistogramFigures, Ratio, Summary
from segue.bench.omni.outcome import OmniSlice, WrongWork
from segue.bench.omni.report import markdown, plot, typical
from segue.bench.omni.results import (
    METRICS,
    LevelResult,
    Result,
    Settings,
    agreement,
    baseline_stages,
    check_agreement,
    check_lengths,
    figures,
)
from segue.bench.own import OwnResult
from segue.bench.own import Row as OwnRow
from segue.bench.plain.comparison import ALL, LOOP, SEGUE, PlainResult
from segue.bench.plain.comparison import Row as PlainRow
from segue.messages.errors import ConfigError

BASELINE = "transformers one at a time"


def level(concurrency: int) -> LevelResult:
    asked = [request(index) for index in range(4)]
    jcts = [1.0, 2.0, 3.0, 6.0]
    mine = OmniSlice("segue", 6.0, [outcome(one, jct) for one, jct in zip(asked, jcts, strict=True)])
    theirs = OmniSlice(BASELINE, 12.0, [outcome(one, jct, scale=4.0) for one, jct in zip(asked, jcts, strict=True)])
    steps = HistogramFigures(40, 0.0125, 0.012, 0.03)
    thinker = StageFigures(
        unit="tokens", made=8.0, busy=3.0, per_busy_second=2.7, utilisation=0.5, steps=steps, batch=steps
    )
    return LevelResult(
        concurrency=concurrency,
        sides={"segue": figures([mine]), BASELINE: figures([theirs])},
        ratios={BASELINE: ratios([mine], [theirs], METRICS)},
        agreement={BASELINE: agreement(mine.outcomes, theirs.outcomes)},
        stages={"segue": {"thinker": thinker}, BASELINE: baseline_stages([theirs])},
        hops={"thinker->talker": HistogramFigures(9, 0.0005, 0.0004, 0.002)},
        usage={
            "segue": SideUsage({"talker": 3.25}, 0.1, 700 * 2**20, 900 * 2**20),
            BASELINE: SideUsage({"process": 20.0}, 0.0, 2**30, 2**30),
        },
        batches={BASELINE: 1.0},
        outcomes={"segue": mine.outcomes, BASELINE: theirs.outcomes},
    )


@pytest.fixture
def result() -> Result:
    found = Machine("A Processor", 2, 24 * 2**30, [], "Linux", "3.11", {"torch": "2.13"}, (0.2, 0.3, 0.4))
    settings = Settings(
        model="qwen2.5-omni-small",
        device="cpu",
        dtype="float32",
        load_format="auto",
        seed=0,
        requests=4,
        rounds=1,
        warmup=4,
        sides=["segue", "one"],
        threads={"segue": {"thinker": 1}, "transformers": {"process": 2}},
        silence=1e-4,
    )
    return Result(finished="2026-11-21T12:00:00+00:00", machine=found, settings=settings, levels=[level(1), level(8)])


def read_result(path: Path) -> Result:
    return result_of(read_values(path), Result, path)


def test_a_result_is_written_and_read_again(result: Result, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # matplotlib's own imports
        path = result_path(tmp_path / "new", "omni")
        write_result(result, path)
        write_report(result, path, markdown, plot)
    assert {one.name for one in path.parent.iterdir()} == {"omni.json", "omni.md", "omni.png"}
    assert read_result(path) == result
    assert path.with_suffix(".md").read_text() == markdown(result)
    image = path.with_suffix(".png")
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size > 10_000


def test_no_run_replaces_the_results_of_another(tmp_path: Path) -> None:
    taken = ["omni.json", "omni-2.md", "omni-3.png", "steps-shape-qwen2.5-7b.json"]
    for name in taken:
        (tmp_path / name).write_text("measured for hours")
    (tmp_path / "text").mkdir()  # the logs of a run that was stopped before its first level
    assert result_path(tmp_path, "omni").name == "omni-4.json"
    assert result_path(tmp_path, "steps-shape-qwen2.5-7b").name == "steps-shape-qwen2.5-7b-2.json"
    assert result_path(tmp_path, "text").name == "text-2.json"


def test_a_run_that_is_stopped_leaves_the_levels_it_measured(
    result: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = result_path(tmp_path, "omni")
    so_far = msgspec.structs.replace(result, finished="", levels=[])

    async def one() -> None:
        so_far.levels.append(level(1))

    async def another() -> None:
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        asyncio.run(measure(so_far, [one, another], lambda kept: write_result(kept, path)))
    left = read_result(path)
    assert ([kept.concurrency for kept in left.levels], left.done, left.planned) == ([1], 1, 2)
    assert left.finished
    assert "Unfinished: 1 of 2 levels." in markdown(left)
    assert pages.main([str(path)]) == 0
    assert "Unfinished: 1 of 2 levels." in capsys.readouterr().out


def test_a_result_of_before_levels_were_counted_is_read(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "omni.json"
    values = msgspec.to_builtins(result, str_keys=True)
    path.write_bytes(
        msgspec.json.encode({name: value for name, value in values.items() if name not in ("done", "planned")})
    )
    assert "Unfinished" not in markdown(read_result(path))


def test_the_tables_say_what_was_measured(result: Result) -> None:
    text = markdown(result)
    assert "2 cores of A Processor, 24 GiB" in text
    assert "Load average at the start: 0.2, 0.3, 0.4" in text
    assert "### 8 clients" in text
    assert "| segue | 3.00 / 2.50 / 5.91 | 0.10 | 0.40 / 0.40 / 0.40 | 1.50 | 0.667 | 1.33 |" in text
    assert "| Segue against transformers one at a time | -75% (-75% to -75%)" in text
    assert "100% / 100%" in text
    assert "| segue | thinker | 2.7 tokens/s | 50% | 40 × 12.5 ms (p99 30) |" in text
    assert "| thinker->talker | 9 | 0.50 | 0.40 | 2.00 |" in text
    assert "| segue | 700 MiB | talker 3.2 | 0.1 |" in text


def test_sides_whose_replies_differ_are_not_compared() -> None:
    check_agreement({BASELINE: {"reply": 0.9, "codes": 0.0}})
    with pytest.raises(WrongWork, match="only 25% of the replies of transformers one at a time equal Segue's"):
        check_agreement({BASELINE: {"reply": 0.25, "codes": 0.25}})
    mine = [outcome(request(0))]
    check_lengths(mine, mine)
    with pytest.raises(WrongWork, match=r"request 0: 2\.000 s of audio; the baseline has 2\.080 s"):
        check_lengths(mine, [msgspec.structs.replace(mine[0], audio_seconds=2.08)])


def test_every_row_of_a_table_has_as_many_cells_as_its_head(result: Result) -> None:
    blocks = [block for block in markdown(result).split("\n\n") if block.startswith("|")]
    assert len(blocks) == 2 * 5
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_the_typical_request_has_the_median_time() -> None:
    outcomes = [outcome(request(index), jct) for index, jct in enumerate([5.0, 1.0, 3.0])]
    assert typical(outcomes).jct == 3.0


def test_what_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"version": 99}')
    with pytest.raises(ConfigError, match="version is 99; this program reads 1"):
        read_result(path)
    path.write_text("[")
    with pytest.raises(ConfigError, match=r"x\.json: not a result"):
        read_result(path)
    with pytest.raises(ConfigError, match=r"gone\.json"):
        read_result(tmp_path / "gone.json")


def test_the_pages_hold_what_the_committed_results_say() -> None:
    """`make figures` changes nothing."""
    for path, text in pages.pages(pages.ROOT).items():
        assert path.read_text() == text, f"{path.name}: run `make figures`"


def test_gains_are_of_rounds_and_losses_stand_in_the_same_table(result: Result) -> None:
    [level] = [one for one in result.levels if one.concurrency == 8]
    slower = [msgspec.structs.replace(one, jct=one.jct * 3) for one in level.outcomes["segue"]]
    level.outcomes["segue"] += slower  # a second round, in which Segue takes three times as long
    level.outcomes[BASELINE] *= 2
    measured = of_omni(result)
    jct = next(one for one in measured.comparisons if one.load == "8 clients" and one.figure.startswith("JCT"))
    assert jct.gains == pytest.approx([4.0, 4 / 3])
    table = comparison_table(measured.comparisons)
    assert "| 8 clients | JCT, s |" in table
    assert "6.0 (3.0–9.0)" in table
    assert "**2.67 (1.33–4.00)×** | 0.7 / 1.0 |" in table
    lost = replace(jct, mine=[4.0], theirs=[1.0])
    assert "| 0.25× |" in comparison_table([lost])


def test_a_table_says_where_it_comes_from_and_what_the_sides_did_not_share(result: Result) -> None:
    result.settings.environment = {"OMP_NUM_THREADS": "2"}
    alike = of_omni(result)
    assert f"commit {result.machine.commit}; {result.settings.rounds} interleaved rounds" in alike.conditions
    assert "only" not in alike.conditions + headline_table([*headlines(result, alike, "x")])
    result.settings.environment = {}
    uneven = of_omni(result)
    for said in (uneven.conditions, headline_table([*headlines(result, uneven, "x")])):
        assert "allocator settings and huge pages on Segue's side only" in said


def test_the_readme_has_a_row_for_each_load_and_rival(result: Result) -> None:
    one = Summary(0.5, 0.5, 0.5, 0.5)
    slower = Ratio(1.25, 1.2, 1.3, [1.0, 1.25, 2.0])
    both = [PlainRow(8, kind, side, 2.0, one, one, slower, None, 1.0) for kind in ("a", ALL) for side in (SEGUE, LOOP)]
    plain = PlainResult(machine=machine(), startup={}, benchmark="bagel", tokens=4, rows=both)
    half = Ratio(0.5, 0.4, 0.6, [0.5])
    own_rows = [OwnRow(1, side, 2.0, one, one, half, 1.0) for side in ("segue", "one at a time")]
    own = OwnResult(machine=machine(), startup={}, frames=2, rows=own_rows)
    sound = sound_result(machine(), 60, [0.5, 0.5, 0.5], [2.0, 1.0, 1.0])
    rows = [*headlines(result, of_omni(result), "x")]
    rows += [row for one in (plain, own, sound) for row in headlines(one, None, "own-small")]
    table = headline_table(rows)
    head, *lines, _, key = table.splitlines()
    assert head == "| what | load | figure | rival | Segue's gain | measured |"
    assert lines[1].startswith("| Speech from mixed media (qwen2.5-omni-small) | 1 client | JCT | ")
    assert lines[1].endswith("| **4.00×** | A |")
    assert lines[2].startswith("|  | 1 client | first audio | "), "a title stands once"
    [bagel] = [line for line in lines if "BAGEL" in line]
    assert bagel == "| BAGEL: a | 8 clients | JCT | plain loop | 0.80 (0.50–1.00)× | B |"
    assert "| A video model of one's own (own-small) | 1 client | JCT | one at a time | **2.00×** | B |" in lines
    assert lines[-1].endswith("| the same models one after the other | **2.00 (2.00–4.00)×** | C |")
    assert key.startswith("Measured on, date, commit: A: 2 cores of A Processor, 2026-11-21, ")


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ConfigError, match=pages.BEGIN):
        pages.insert("nothing here", "tables")


def test_this_machine_can_be_described() -> None:
    found = machine()
    assert found.cpu
    assert found.cores >= 1
    assert found.memory_bytes > 2**28
    assert found.packages["torch"]
