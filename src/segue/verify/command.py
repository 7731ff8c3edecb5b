"""Run `segue verify DIR`: plan the passes, ask both sides, compare and report."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from segue.bench.harness.hardware import machine
from segue.bench.harness.process import ChildProcess
from segue.graph.deployment.deployment import Hardware
from segue.graph.machine.hardware import detect_hardware
from segue.messages.errors import ConfigError, SegueError
from segue.messages.reference import LibraryAnswer
from segue.messages.reference import Question as Asked
from segue.verify import report as reports
from segue.verify.compare import Row, compared
from segue.verify.fits import GiB, Pass, minutes, passes
from segue.verify.library_process import Loaded, Options
from segue.verify.questions import Question, questions
from segue.verify.segue_side import ALONE, TOGETHER, Served, deployment, serve
from segue.verify.subject import Subject, read_subject

Library = ChildProcess[Asked, Loaded, LibraryAnswer]


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 0: equal, 1: different, 2: not everything could be compared. Raises `ConfigError`."""
    began = time.monotonic()
    subject = read_subject(arguments.model)
    against = subject if arguments.against is None else read_subject(arguments.against)
    if arguments.json is not None:
        _check_report_file(arguments.json, (subject, against), arguments.config)
    asked = _asked(subject, arguments)
    hardware = detect_hardware()
    device = _device(arguments.device, hardware)
    ranks = arguments.tensor_parallel or 1
    planned = passes(subject, hardware, device, arguments.dtype or [], ranks)
    running = [one for one in planned if one.left_out is None]
    stored = sum(path.stat().st_size for path in subject.files)
    print(f"checkpoint  {subject.name}: {', '.join(_architectures(subject))}, family {subject.family.name}")
    print(f"weights     {stored / GiB:.2f} GiB in {subject.dtype}")
    header = machine(hardware)
    gpus = ", ".join(header.gpus) or "no GPU"
    print(f"machine     {header.cpu}, {header.cores} cores, {header.memory_bytes / GiB:.0f} GiB; {gpus}")
    for one in planned:
        what = f"needs about {one.needs / GiB:.1f} GiB" if one.left_out is None else f"LEFT OUT: {one.left_out}"
        print(f"pass        {one.dtype} on {device}: {what}")
    print(f"requests    {', '.join(question.name for question in asked)}")
    if running:
        least, most = minutes(subject, running, asked, device)
        print(f"time        about {max(1, round(least))} to {max(1, round(most + 0.5))} minutes", flush=True)
    rows: list[Row] = []
    versions = {"segue": _version(), "python": header.python}
    written: dict[str, object] = {}
    for one in running:
        config: Any = arguments.config or deployment(subject, hardware, device, one.dtype, ranks)
        written[one.dtype] = config.read_text() if arguments.config else config
        made, seen = asyncio.run(_pass(subject, against, asked, one, device, hardware, config, arguments, _say))
        rows += made
        versions |= seen
    left_out = [reports.LeftOut(one.dtype, one.left_out) for one in planned if one.left_out is not None]
    made_report = reports.Report(
        status=reports.status_of(rows, left_out),
        architectures=_architectures(subject),
        family=subject.family.name,
        stored_dtype=subject.dtype,
        weight_bytes=stored,
        device=device,
        versions=versions,
        machine=header,
        config={key: value for key, value in subject.config.items() if key != "_name_or_path"},
        deployment=written,
        rows=rows,
        left_out=left_out,
        seconds=time.monotonic() - began,
    )
    print("versions    " + ", ".join(f"{name} {number}" for name, number in versions.items()))
    print()
    if rows:
        print(reports.table(rows))
    for line in [*reports.reasons(rows), *(f"left out: {one.dtype}: {one.reason}" for one in made_report.left_out)]:
        print(line)
    print()
    print(reports.conclusion(made_report))
    if arguments.json is not None:
        hidden = {str(one.model_dir): "DIR" for one in (subject, against)} | {str(Path.home()): "HOME"}
        reports.write(made_report, arguments.json, hidden)
        print(f"all of it is in {arguments.json}")
    return made_report.status


def _check_report_file(file: Path, subjects: tuple[Subject, ...], config: Path | None) -> None:
    """Raise `ConfigError` if the report cannot be written there, or would replace a file that this command reads."""
    if not file.parent.is_dir():
        raise ConfigError(f"--json {str(file)!r}: its directory does not exist", field="json")
    if file.is_dir():
        raise ConfigError(f"--json {str(file)!r} is a directory; name a file", field="json")
    for subject in subjects:
        if subject.holds(file):
            where = f"in the directory of the checkpoint, {str(subject.model_dir)!r}"
            raise ConfigError(f"--json {str(file)!r} is {where}; name a file elsewhere", field="json")
    if config is not None and file.exists() and config.exists() and file.samefile(config):
        raise ConfigError(f"--json {str(file)!r} would replace the file of --config; name another", field="json")


def _asked(subject: Subject, arguments: argparse.Namespace) -> list[Question]:
    if subject.family.reference_module is None:
        raise ConfigError(
            f"the family {subject.family.name!r} has no library call to compare with: its Family sets no "
            "reference_module",
            field="model",
        )
    asked = questions(subject, quick=arguments.quick)
    if not asked:
        raise ConfigError(f"there are no requests for this model's outputs: {', '.join(subject.graph.gives)}")
    if arguments.only is None:
        return asked
    chosen = [question for question in asked if arguments.only in question.name]
    if not chosen:
        names = ", ".join(question.name for question in asked)
        raise ConfigError(f"--only {arguments.only!r} is in no request's name; the names are: {names}", field="only")
    return chosen


def _device(wanted: str, hardware: Hardware) -> str:
    gpus = hardware.gpus
    if wanted == "cuda" and not gpus:
        raise ConfigError("--device cuda: nvidia-smi lists no GPU that this process may use", field="device")
    if wanted == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read by both sides' processes
    return "cuda" if gpus and wanted != "cpu" else "cpu"


async def _pass(
    subject: Subject,
    against: Subject,
    asked: list[Question],
    one: Pass,
    device: str,
    hardware: Hardware,
    config: Any,
    arguments: argparse.Namespace,
    say: Callable[[str], None],
) -> tuple[list[Row], dict[str, str]]:
    """Compare one dtype; return its rows, and the versions of the library's process."""
    say(f"{one.dtype}: Segue is starting")
    try:
        served = await serve(subject, asked, one.dtype, config, arguments.tensor_parallel, say)
    except SegueError as error:
        figure = f"Segue cannot serve it: {error.message}"
        return [_failed(subject, one.dtype, figure)], {}
    say(f"{one.dtype}: the library is loading")
    answers, versions, failure = await _library(against, served, one.dtype, device, hardware, say)
    rows = []
    for place, each in enumerate(served):
        own = {how: answers[key] for how in each.outputs if (key := (place, how)) in answers}
        missing = None if own.keys() == each.outputs.keys() else failure
        rows += compared(subject, one.dtype, each, own, missing)
    return rows, versions


async def _library(
    subject: Subject,
    served: list[Served],
    dtype: str,
    device: str,
    hardware: Hardware,
    say: Callable[[str], None],
) -> tuple[dict[tuple[int, str], LibraryAnswer], dict[str, str], str]:
    """Return ((index of the question, how Segue was asked) → answer, versions, why other answers are missing)."""
    module = subject.family.reference_module
    assert module is not None, "checked before"
    where = "cpu" if device == "cpu" else "cuda:0" if len(hardware.gpus) == 1 else "auto"
    options = Options(module=module, model_dir=str(subject.model_dir), device=where, dtype=dtype, threads=hardware.cpus)
    process: Library = ChildProcess("the library", "segue.verify.library_process", options, Loaded, LibraryAnswer, {})
    answers: dict[tuple[int, str], LibraryAnswer] = {}
    versions: dict[str, str] = {}
    try:
        loaded = await process.start()
        versions = loaded.versions
        if loaded.error is not None:
            say(f"the library cannot load it: {loaded.error}")
            return answers, versions, f"it cannot load the checkpoint: {loaded.error}"
        say(f"the library is ready after {process.startup:.0f} s")
        for place, one in enumerate(served):
            if one.request is None:
                continue
            for how, output in one.outputs.items():
                if how == TOGETHER and output.token_ids == one.outputs[ALONE].token_ids:
                    answers[place, how] = answers[place, ALONE]  # the library follows the same reply
                    continue
                index = len(answers)
                answer = await process.ask(Asked(index, one.request, output.token_ids))
                answers[place, how] = answer
                said = "FAILED" if answer.error else "refused" if answer.refused else f"{answer.seconds:.1f} s"
                say(f"the library: {one.question.name}{'' if how == ALONE else ', ' + how}: {said}")
    except SegueError as error:  # the process is gone
        hint = ", perhaps killed for lack of memory" if "ended by itself" in error.message else ""
        return answers, versions, f"{error.message}{hint}"
    finally:
        await process.stop()
    return answers, versions, ""


def _failed(subject: Subject, dtype: str, figure: str) -> Row:
    return Row(
        stage=subject.graph.main, kind="", question="all", dtype=dtype, served="", verdict="FAILED", figure=figure
    )


def _architectures(subject: Subject) -> list[str]:
    return [str(name) for name in subject.config.get("architectures") or []]


def _version() -> str:
    try:
        return version("segue")
    except PackageNotFoundError:
        return "not installed"


def _say(line: str) -> None:
    print(f"segue: {line}", file=sys.stderr, flush=True)
