"""`segue bench mimo-audio` and `bagel`: Segue and a plain loop answer the same requests, with equal tokens; and the
result of the assistant's example."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from segue.bench import figures
from segue.bench.first_sound import sound_result
from segue.bench.harness.hardware import machine
from segue.bench.harness.results import read_values, result_of, write_result
from segue.bench.harness.stats import Ratio, Summary
from segue.bench.main import main
from segue.bench.plain import bagel, mimo_audio
from segue.bench.plain.comparison import (
    ALL,
    LOOP,
    SEGUE,
    Image,
    Made,
    Outcome,
    PlainRequest,
    PlainResult,
    Row,
    Workload,
    same,
)
from segue.messages.errors import ConfigError

MOST_LINES = 200
WORKLOADS = (mimo_audio.WORKLOAD, bagel.WORKLOAD)


@pytest.mark.nightly
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_both_sides_make_the_same(tmp_path: Path, workload: Workload) -> None:
    asked = ["--concurrency", "1,2", "--requests", "4", "--rounds", "1", "--tokens", "16", "--size", "tiny"]
    draws = workload.denoiser != ""
    asked += ["--side", "64", "--steps", "4"] if draws else []
    assert main([workload.name, "--out", str(tmp_path), "--cache", str(tmp_path), *asked]) == 0
    file = tmp_path / f"{workload.name}.json"
    result = result_of(read_values(file), PlainResult, file)
    kinds = [*workload.kinds, ALL]
    assert [(row.clients, row.kind, row.side) for row in result.rows] == [
        (clients, kind, side) for clients in (1, 2) for kind in kinds for side in (SEGUE, LOOP)
    ]
    assert all(row.equal == 1 for row in result.rows)
    assert all(0 < row.first_output.p50 <= row.jct.p50 for row in result.rows)
    assert (result.ceiling > 0) == draws
    assert {row.kind for row in result.rows if row.denoising} == {
        kind for kind, ask in workload.kinds.items() if "image" in ask(0)["modalities"]
    }
    assert {row.kind for row in result.rows if row.rtf is not None} == {
        kind for kind, ask in workload.kinds.items() if "audio" in ask(0)["modalities"]
    }


@pytest.mark.nightly
def test_images_alone_are_compared_with_the_ceiling(tmp_path: Path) -> None:
    asked = ["--concurrency", "2", "--requests", "4", "--rounds", "1", "--size", "tiny", "--side", "48", "--steps", "3"]
    out = ["--out", str(tmp_path), "--cache", str(tmp_path)]
    assert main(["bagel", *asked, *out, "--kinds", "text-image,image-image"]) == 0
    result = result_of(read_values(file := tmp_path / "bagel.json"), PlainResult, file)
    assert [row.kind for row in result.rows[::2]] == ["text → image", "image → image", ALL]
    assert all(row.equal == 1 and row.denoising is not None and 0 < row.denoising < 1 for row in result.rows)
    assert "48 × 48 pixels and 3 noise levels" in figures.full(file)


def test_its_report_stands_among_the_figures(tmp_path: Path) -> None:
    one = Summary(0.5, 0.5, 0.5, 0.5)
    for workload in WORKLOADS:
        rows = [Row(8, kind, LOOP, 2.0, one, one, Ratio(0.25, 0.2, 0.3, [0.25]), None, 1.0) for kind in workload.kinds]
        result = PlainResult(machine=machine(), startup={LOOP: 1.0}, benchmark=workload.name, tokens=16, rows=rows)
        write_result(result, path := tmp_path / f"{workload.name}.json")
        kind, read = figures.read(path)
        assert (kind, read) == (workload.name, result)
        report = figures.full(path)
        assert all(f"| 8 | {kind} | plain loop |" in report for kind in workload.kinds)
        assert "0.25×" in report


def test_first_sounds_stand_among_the_figures(tmp_path: Path) -> None:
    write_result(sound_result(machine(), 60, [0.5, 0.7], [2.0, 2.8]), path := tmp_path / "first-sound.json")
    report = figures.full(path)
    assert "| one graph | 2 | 0.60 (0.50–0.70) | 1.00× |" in report
    assert "| one after the other | 2 | 2.40 (2.00–2.80) | 0.25× |" in report


def test_what_one_side_lacks_is_noticed() -> None:
    mine = Made(token_ids=[1, 2], audio_seconds=0.5, image=b"\x05\x09")
    assert same(mine, Made(token_ids=[1, 2], audio_seconds=0.5, image=b"\x04\x0a"))
    for other in ({"token_ids": [1, 3]}, {"audio_seconds": 0.54}, {"image": b"\x05\x0b"}, {"image": b"\x05"}):
        assert not same(mine, msgspec.structs.replace(mine, **other))
    with pytest.raises(RuntimeError, match="request 7 has 2 tokens, not 3"):
        Outcome(mine, 0.1, 0.2).check(PlainRequest(7, "text → text", 0, 3))
    with pytest.raises(RuntimeError, match="request 7 has an image of 2 bytes, not of 8² pixels"):
        Outcome(mine, 0.1, 0.2).check(PlainRequest(7, "text → image", 0, 2, Image(8, 3)))


def test_an_unknown_size_is_refused(tmp_path: Path) -> None:
    out = ["--cache", str(tmp_path), "--out", str(tmp_path)]
    with pytest.raises(ConfigError, match="bagel has no size 'smal'; it has tiny, small"):
        main(["bagel", "--size", "smal", *out])
    with pytest.raises(ConfigError, match="no kind of requests 'text-images'; did you mean 'text-image'"):
        main(["bagel", "--kinds", "text-images", *out])


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_workload_is_short(workload: Workload) -> None:
    folder = Path(str(bagel.__file__)).parent
    for name in (workload.name.replace("-", "_"), workload.loop.rpartition(".")[2]):
        assert len((folder / f"{name}.py").read_text().splitlines()) <= MOST_LINES
