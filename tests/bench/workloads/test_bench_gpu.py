"""`segue bench gpu`: its steps, that it goes on after what fails, its report; and attention by itself, on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from segue.bench.gpu_check import Step, check, steps
from segue.bench.harness.results import read_values
from segue.bench.main import main, parser
from segue.bench.steps.arguments import AttentionBench
from segue.bench.steps.attention import measure, variants
from segue.graph.machine.hardware import detect_hardware

pytestmark = pytest.mark.slow

SCRIPT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_the_steps_can_be_run_and_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = steps(tmp_path)
    assert [step.name for step in every] == list("ABCDHEFG")
    assert sum(step.minutes for step in every) <= 40
    for step in every:
        if "bench" in step.command:
            parser().parse_args(step.command[step.command.index("bench") + 1 :])
        else:
            assert all(Path(part).exists() for part in step.command if part.startswith("tests/"))
    assert main(["gpu", "--dry-run", "--only", "ad", "--out", str(tmp_path / "none")]) == 0
    shown = capsys.readouterr().out
    assert [line[0] for line in shown.splitlines() if line[0] != " "] == ["A", "D"]
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(bool(detect_hardware().gpus), reason="there is a GPU")
def test_a_machine_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--out", str(tmp_path / "none")]) == 1
    assert "nothing was run: it needs an NVIDIA GPU, and this machine has none" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def step(name: str, script: str, minutes: float = 1.0) -> Step:
    return Step(name=name, what=f"does {name}", command=[sys.executable, "-c", script], minutes=minutes, expected="")


@pytest.mark.nightly
def test_it_goes_on_after_what_fails_and_writes_one_report(tmp_path: Path) -> None:
    chosen = [
        step("bad", "print('a clue'); raise SystemExit(3)"),
        step("slow", SCRIPT, minutes=0.05),
        step("good", "print('\\n'.join(map(str, range(1000))))"),
    ]
    report = check(chosen, tmp_path, 600)
    bad, slow, good = report.ran
    assert (bad.said, bad.tail) == ("failed (3)", "a clue")
    assert slow.said == "timed out"
    child = int(slow.tail.splitlines()[0])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, "it ends with it"
    assert good.said == "passed"
    assert good.tail.splitlines()[-1] == "999"
    assert len((tmp_path / "good.log").read_text().splitlines()) == 1000 > len(good.tail.splitlines())
    assert [ran["status"] for ran in read_values(tmp_path / "report.json")["ran"]][::2] == [3, 0]
    text = (tmp_path / "report.md").read_text()
    assert "| bad | does bad | failed (3) |" in text
    assert "a clue" in text


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    [ran] = check([step("late", "print()")], tmp_path, 0).ran
    assert ran.said == "not begun: no time was left"


def test_attention_by_itself(tmp_path: Path) -> None:
    device = ["--device", "cpu", "--dtype", "float32", "--shorter", "512"]
    assert main(["attention", *device, "--backends", "torch", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "attention.json").read_text())
    assert all(row["gigabytes_per_second"] > 0 for row in rows)
    assert {row["level"] for row in rows} >= {"1 x 32768", "128 x 8192", "63 x 512 and 1 x 65536"}
    assert main(["attention", *device, "--backends", "flashinfer", "--out", str(tmp_path)]) == 1, "it is not installed"
    assert "flashinfer" in json.loads((tmp_path / "attention.json").read_text())[0]["failure"]


@pytest.mark.nightly  # test_kernels_triton has the kernel
def test_other_tiles_of_the_decode_kernel() -> None:
    pytest.importorskip("triton")
    tried = variants(AttentionBench(backends=["torch"], tiles=True))
    assert [one.name for one in tried[:2]] == ["torch", "triton, 3 stages, 64 keys, 2 splits"]
    assert len({one.name for one in tried}) == 1 + 8
    one = measure(tried[1], "few", (5, 90), "cpu", "float32")  # in Triton's interpreter
    assert one.failure is None
    assert one.backend == tried[1].name
    assert one.gigabytes_per_second
