"""`segue bench gpu`: run everything that can be checked only on a GPU, and write one report.

Steps run one after the other, each as a process with a time limit. A step that fails or exceeds its limit does not stop
the others, since a machine with a GPU may be available only for an hour. The report is rewritten after each step.

Step C measures other tiles, stages and splits of the decode kernel and the current ones (`decode_tile` and `FILLED` of
`segue.kernels.attention.backends.triton_kernels`), which are constants: after a better one is written there,
`--only BF` measures the steps again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from segue.bench.harness.arguments import progress
from segue.bench.harness.hardware import Machine, machine
from segue.bench.harness.process import python_path
from segue.bench.harness.report import table, versions
from segue.bench.harness.results import VERSION, now, write_result
from segue.cli.parser import Parser
from segue.graph.machine.hardware import detect_hardware

REPOSITORY = Path(__file__).parents[3]
TAIL_LINES = 60
GRACE = 10.0
"""Seconds for a step's processes to end after a signal."""


class Step(msgspec.Struct, kw_only=True):
    """One step: a process with a time limit."""

    name: str
    what: str
    command: list[str]
    minutes: float
    """Time limit in minutes."""
    expected: str
    """The expected result, predicted from the code."""


class Ran(msgspec.Struct, kw_only=True):
    """The outcome of a step."""

    name: str
    status: int | None
    """Exit status; negative: the signal that ended it; None: it did not start."""
    seconds: float = 0.0
    timed_out: bool = False
    tail: str = ""
    """The end of its output; the whole output is in a file next to the report."""

    @property
    def said(self) -> str:
        if self.status is None:
            return "not begun: no time was left"
        return "timed out" if self.timed_out else "passed" if self.status == 0 else f"failed ({self.status})"


class GpuReport(msgspec.Struct, kw_only=True):
    version: int = VERSION
    machine: Machine
    driver: str
    began: str
    steps: list[Step]
    ran: list[Ran]


def steps(out: Path) -> list[Step]:
    """The steps of a GPU check, those that verify most first; 40 minutes in total."""

    def tests(options: str) -> list[str]:
        words = "-m pytest -q -m gpu -p no:cacheprovider"
        warnings = "-o filterwarnings=default"  # versions may differ from the pinned ones
        return [sys.executable, *words.split(), *warnings.split(), *options.split()]

    def bench(options: str, name: str) -> list[str]:
        return [sys.executable, "-m", "segue.cli", "bench", *options.split(), "--out", str(out / name)]

    of_steps = "steps --batches 1,32,128 --prefills 128,2048,8192 --repeats 2"
    few = "--concurrency 4 --requests 4 --rounds 1 --warmup 1 --baseline one"
    return [
        Step(
            name="A",
            what="kernels, connectors and shared weights against their references",
            command=tests("tests/kernels tests/connectors tests/worker"),
            minutes=4,
            expected="all pass; at risk: out of resources at width 512 in float32",
        ),
        Step(
            name="B",
            what="decode steps and prefill of a 7B shape",
            command=bench(f"{of_steps} --sides segue --profile 1,128 --seconds 300", "B"),
            minutes=5,
            expected="steps recorded at least 95% (0: capture failed, the warning says why); decode at most 1.9 times "
            "the bandwidth bound, prefill at least 55% of the ceiling; about 38 kernels per layer in the profile",
        ),
        Step(
            name="C",
            what="attention of a decode step by itself",
            command=bench("attention --tiles", "C"),
            minutes=6,
            expected="long and many sequences near the bandwidth of B's copy, 63 short with a long one not far below; "
            "the best tile per level is the last table",
        ),
        Step(
            name="D",
            what="whole systems: forked workers, kill and restart, compiled, quantised, images",
            command=tests("tests/e2e/server/test_gpu_served.py tests/bench"),
            minutes=5,
            expected="all pass",
        ),
        Step(
            name="H",
            what="every family of `segue tiny` on the GPU against the CPU",
            command=tests("-n 6 tests/e2e/server/test_gpu_families.py"),
            minutes=8,
            expected="all pass; at risk: codes of recordings, which flip by rounding",
        ),
        Step(
            name="E",
            what="a denoiser against the library",
            command=bench("denoise --steps 10 --sides segue,segue-compiled,eager,compiled --seconds 300", "E"),
            minutes=6,
            expected="segue like eager, segue-compiled like compiled",
        ),
        Step(
            name="F",
            what="B again with compiled layers",
            command=bench(f"{of_steps} --sides segue-compiled --seconds 150", "F"),
            minutes=3,
            expected="steps recorded at least 95%; decode below B's, since elementwise kernels are fused",
        ),
        Step(
            name="G",
            what="an omni model of 7B against the library, few requests",
            command=bench(f"omni --shape 7b --device cuda {few}", "G"),
            minutes=3,
            expected="every request answered; JCT, RTF and time to first audio of both sides",
        ),
    ]


def add_gpu(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the sub-command and its arguments."""
    command = commands.add_parser(
        "gpu",
        help="check and measure everything that needs a GPU; one report",
        epilog="All steps take 40 minutes. In parts, each with a report of its own, and without network: "
        "segue bench gpu --only AB --out out/gpu/AB; then CD, then EFGH.",
    )
    command.add_argument("--out", type=Path, default=Path("out/gpu"), help="directory of the report")
    command.add_argument("--minutes", type=float, default=40.0, help="for all steps together (default: 40)")
    command.add_argument("--only", metavar="LETTERS", help="some of the steps, e.g. AD (default: all)")
    command.add_argument("--dry-run", action="store_true", help="print the steps and run nothing")
    command.set_defaults(run=_gpu)


def _gpu(arguments: argparse.Namespace) -> int:
    out = arguments.out.resolve()
    chosen = [step for step in steps(out) if arguments.only is None or step.name in arguments.only.upper()]
    if arguments.dry_run:
        for step in chosen:
            print(f"{step.name}  {step.minutes:g} min  {step.what}\n   {shlex.join(step.command)}")
        return 0
    found = detect_hardware()
    if not found.gpus:
        why = "; ".join(found.gpu_notes) or "this machine has none"
        print(f"segue bench gpu: nothing was run: it needs an NVIDIA GPU, and {why}", file=sys.stderr)
        return 1
    report = check(chosen, out, arguments.minutes * 60)
    return 1 if any(ran.status != 0 for ran in report.ran) else 0


def check(chosen: Sequence[Step], out: Path, seconds: float) -> GpuReport:
    """Run the steps and write `report.md`, `report.json` and the whole output of each step into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    report = GpuReport(machine=machine(), driver=_driver(), began=now(), steps=[*chosen], ran=[])
    for step in chosen:
        left = seconds - (time.monotonic() - began)
        progress(f"{step.name}: {step.what}")
        report.ran.append(Ran(name=step.name, status=None) if left <= 0 else run_step(step, out, left))
        progress(f"{step.name}: {report.ran[-1].said}, {report.ran[-1].seconds:.0f} s")
        write_result(report, out / "report.json")
        (out / "report.md").write_text(markdown(report))
    progress(f"written: {out / 'report.md'}, {out / 'report.json'}")
    return report


def run_step(step: Step, out: Path, left: float) -> Ran:
    """Run one step with its output in a file; ends it and its children at the time limit."""
    limit = min(step.minutes * 60, left)
    path = out / f"{step.name}.log"
    began = time.monotonic()
    timed_out = False
    with path.open("wb") as log:
        process = subprocess.Popen(
            step.command,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": python_path(), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = True
            status = _end(process)
        with suppress(ProcessLookupError):  # leftover processes would take device memory from the next step
            os.killpg(process.pid, signal.SIGKILL)
    lines = path.read_text(errors="replace").splitlines()
    seconds, tail = time.monotonic() - began, "\n".join(lines[-TAIL_LINES:])
    return Ran(name=step.name, status=status, seconds=seconds, timed_out=timed_out, tail=tail)


def _end(process: subprocess.Popen[bytes]) -> int:
    """End a session of processes: signal them first, so that they can write their results, then kill them."""
    for number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.wait(GRACE)
        except subprocess.TimeoutExpired:
            progress(f"it does not end on {number.name}")
    return -signal.SIGKILL  # the driver holds it in the kernel: leave it


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().partition("\n")[0].strip() if path.is_file() else "not known"


def markdown(report: GpuReport) -> str:
    """The report in Markdown."""
    found = report.machine
    rows = [
        [step.name, step.what, ran.said, f"{ran.seconds:.0f} s of {60 * step.minutes:.0f}", step.expected]
        for step, ran in zip(report.steps, report.ran, strict=False)
    ]
    parts = [
        f"# GPU check, {report.began}",
        f"{', '.join(found.gpus) or 'no GPU'}; driver: {report.driver}; {found.cores} cores of {found.cpu}; "
        f"{found.system}, Python {found.python}, {versions(found.packages)}.",
        table(["step", "what", "result", "time", "expected"], rows),
    ]
    for step, ran in zip(report.steps, report.ran, strict=False):
        parts.append(f"## {step.name}: {step.what}\n\n`{shlex.join(step.command)}`\n\n```text\n{ran.tail}\n```")
    return "\n\n".join(parts) + "\n"
