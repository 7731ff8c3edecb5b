"""The commands beside `serve`: what they print, what they write, how they refuse."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import av
import psutil
import pytest
from server_process import ASSETS, environment, segue

from segue.cli.main import main, parser
from segue.kernels.cpu.native import library
from segue.server.settings import ServerSettings


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> Path:
    return tiny_dir


def seconds_of(path: Path) -> float:
    with av.open(str(path)) as file:
        return sum(frame.samples / frame.sample_rate for frame in file.decode(audio=0))


def test_generate_reads_all_kinds_and_writes_speech(model: Path, tmp_path: Path) -> None:
    media = ["--image", "photo.jpg", "--audio", "speech.wav", "--video", "video.mp4"]
    paths = [word if word.startswith("--") else str(ASSETS / word) for word in media]
    speech = tmp_path / "speech.opus"
    done = segue("generate", str(model), "What is that?", "--max-tokens", "4", "--seed", "1", *paths, "-o", str(speech))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert seconds_of(speech) > 0.2
    assert ("compiled kernels" in done.stderr) == (library() is None)


def test_generate_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    for path, text in ((tmp_path / "x.xyz", "no known audio format"), (tmp_path / "no" / "x.wav", "no directory")):
        done = segue("generate", str(model), "hi", "-o", str(path))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("segue: error: --output ")
        assert text in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_generate_keeps_what_it_reads(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output in the place of an input is refused before anything starts, whichever way the file is named."""
    (tmp_path / "voice.wav").write_bytes((ASSETS / "speech.wav").read_bytes())
    (tmp_path / "other.wav").symlink_to("voice.wav")
    for output in ("voice.wav", "other.wav"):
        given = ["--audio", str(tmp_path / "voice.wav"), "-o", str(tmp_path / output)]
        assert main(["generate", str(model), "What was said?", *given]) == 2
        assert "voice.wav', which the request reads" in capsys.readouterr().err
    assert (tmp_path / "voice.wav").read_bytes() == (ASSETS / "speech.wav").read_bytes()


def test_generate_names_what_is_wrong(model: Path) -> None:
    done = segue("generate", str(model), "hi", "--voice", "Chelsy", "-o", os.devnull + ".wav")
    assert done.returncode == 2
    assert "did you mean 'Chelsie'?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--max-body-bytes", "many", "'many' is not a size above 0"),
        ("--max-body-bytes", "0", "'0' is not a size above 0"),
        ("--upload-seconds", "0", "'0' is not a number of seconds above 0"),
        ("--stall-seconds", "-1", "'-1' is not a number of seconds above 0"),
        ("--drain-seconds", "nan", "'nan' is not a number of seconds above 0"),
    ],
)
def test_serve_names_an_impossible_limit(option: str, value: str, text: str) -> None:
    done = segue("serve", "nowhere", f"{option}={value}")
    assert done.returncode == 2
    assert f"argument {option}: {text}" in done.stderr


def test_limits_of_serve_are_read() -> None:
    limits = ["--max-body-bytes", "2MiB", "--upload-seconds", "9", "--stall-seconds", "5", "--drain-seconds", "0.5"]
    read = parser().parse_args(["serve", "nowhere", *limits])
    assert (read.max_body_bytes, read.upload_seconds, read.stall_seconds, read.drain_seconds) == (2 << 20, 9, 5, 0.5)
    plain, settings = parser().parse_args(["serve", "nowhere"]), ServerSettings()
    for name in ("max_body_bytes", "upload_seconds", "stall_seconds", "drain_seconds"):
        assert getattr(plain, name) == getattr(settings, name)


def test_interrupting_generate_leaves_nothing(model: Path, tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    endless.write_text("stages: {thinker: {sampling: {ignore_eos: true}}}")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "segue.cli",
            "generate",
            str(model),
            "hi",
            "--max-tokens",
            "20000",
            "--config",
            endless,
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # as from a terminal: where these tests run in the background of a shell, the signal is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    while "is ready" not in process.stderr.readline():
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not psutil.wait_procs(children, timeout=120)[1]


def test_graph(model: Path) -> None:
    as_text = segue("graph", str(model))
    assert as_text.returncode == 0
    assert "vocoder" in as_text.stdout
    assert segue("graph", str(model), "--mermaid").stdout.startswith("flowchart LR")


def test_a_reader_that_has_had_enough(model: Path) -> None:
    """As `segue graph DIR | head -1`: no traceback."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        command = [sys.executable, "-m", "segue.cli", "graph", str(model)]
        done = subprocess.run(command, env=environment(), stdout=closed, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        ("graph", ""),
        ("graph --mermaid", "1"),
        pytest.param("tiny qwen3", "1", marks=pytest.mark.nightly),
        pytest.param("bench hop", "", marks=pytest.mark.nightly),
        ("--help", ""),
        ("--help", "1"),
        pytest.param("serve --help", "1", marks=pytest.mark.nightly),
        pytest.param("bench text --help", "1", marks=pytest.mark.nightly),
        pytest.param("bench hop --help", "1", marks=pytest.mark.nightly),
    ],
)
def test_an_output_that_takes_nothing(model: Path, tmp_path: Path, command: str, unbuffered: str) -> None:
    """As `segue graph DIR > /dev/full`: the last line says it, and there is no traceback, whatever Python buffers."""
    operands = {"tiny qwen3": [str(tmp_path / "made")], "bench hop": ["--mib", "0.1", "--rounds", "2"]}
    line = [sys.executable, "-m", "segue.cli", *command.split(), *operands.get(command, [str(model)])]
    variables = environment(PYTHONUNBUFFERED=unbuffered)
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, env=variables, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "segue: error: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_a_standard_error_that_takes_nothing(model: Path) -> None:
    """As where the log lies on a full disk: what it would have said is lost, and nothing else."""
    line = [sys.executable, "-m", "segue.cli", "generate", str(model), "hi", "--max-tokens", "4", "--seed", "1"]
    variables = environment(PYTHONUNBUFFERED="1")
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, env=variables, stdout=subprocess.PIPE, stderr=full, text=True, timeout=240)
    assert done.returncode == 0
    assert done.stdout.strip()


def test_without_an_output_at_all(model: Path) -> None:
    """As `segue graph DIR >&-`."""
    line = f"exec {sys.executable} -m segue.cli graph {model} >&-"
    done = subprocess.run(["/bin/sh", "-c", line], env=environment(), capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tiny", "qwen9", "x"], "no tiny preset 'qwen9'"),
        pytest.param(["tiny", "qwen2.5-omni", "x", "--size", "huge"], "no size 'huge'", marks=pytest.mark.nightly),
        (["tiny", "qwen2.5-omni", __file__], "cannot be written"),
        (["graph", "/nowhere"], "no checkpoint at '/nowhere'"),
        (["serve", "x", "--media-root", "/nowhere"], "--media-root '/nowhere' is not a directory"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], text: str) -> None:
    done = segue(*arguments)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if "[transformers]" not in line]
    assert line.startswith("segue: error: ")
    assert text in line


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["graph"], ["tiny"], ["bench"]])
def test_help(command: list[str]) -> None:
    done = segue(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: segue")


def test_no_command_or_an_unknown_one() -> None:
    assert segue().returncode == 2
    assert "invalid choice: 'srve'" in segue("srve").stderr


def options_of(command: str) -> list[argparse.Action]:
    [commands] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return commands.choices[command]._actions


@pytest.mark.parametrize("command", ["serve", "generate", "graph", "tiny"])
def test_help_says_what_each_argument_is(command: str) -> None:
    for action in options_of(command):
        name = " ".join(action.option_strings) or action.dest
        assert action.help, name
        if action.default not in (None, False, []) and action.dest != "help":
            assert "default: %(default)" in action.help, name


def test_options_that_commands_share_are_alike() -> None:
    seen: dict[str, argparse.Action] = {}
    for command in ("serve", "generate", "graph"):
        for action in options_of(command):
            for name in action.option_strings:
                same = seen.setdefault(name, action)
                if name not in ("--lora", "--seed"):  # the one loads several, the other one alone
                    assert (action.type, action.default, action.help) == (same.type, same.default, same.help), name


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "x", "--prot", "1"], "segue serve: error: unrecognized argument --prot, did you mean --port?"),
        (["serve", "x", "--media-rot=y"], "segue serve: error: unrecognized argument --media-rot, did you mean"),
        (["generate", "x", "y", "--qqqqqq"], "segue generate: error: unrecognized argument --qqqqqq;"),
        (["serve", "x", "--api-key", ""], "segue serve: error: argument --api-key: the key is empty;"),
        (
            ["serve", "x", "--allowed-host", "a:80"],
            "segue serve: error: argument --allowed-host: 'a:80' is not a host name",
        ),
        (["serve"], "segue serve: error: the following arguments are required: model;"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(arguments)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert text in line
    assert line.endswith(" --help")


def test_the_version_is_told() -> None:
    done = segue("--version")
    assert (done.returncode, done.stdout) == (0, f"segue {version('segue')}\n")
