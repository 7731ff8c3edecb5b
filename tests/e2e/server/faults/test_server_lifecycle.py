"""How `segue serve` starts and stops: signals, broken checkpoints, impossible settings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import NAME, Served, body, finished, ids_of, segue, served

CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 20_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> Path:
    return tiny_dir


@pytest.fixture
def server(model: Path) -> Iterator[Served]:
    with served(model, "--drain-seconds", "240") as server:
        yield server


def ask(server: Served, **fields: object) -> httpx.Response:
    with server.client() as http:
        return http.post(CHAT, json=body(return_token_ids=True, **fields))


def assert_gone(family: list[psutil.Process], directory: Path) -> None:
    _, left = psutil.wait_procs(family, timeout=120)
    assert not left
    assert not directory.exists()


@pytest.mark.parametrize(
    ("number", "to_group"), [pytest.param(signal.SIGTERM, False, marks=pytest.mark.nightly), (signal.SIGINT, True)]
)
def test_a_signal_lets_running_requests_end(server: Served, number: int, to_group: bool) -> None:
    family, directory = server.family(), server.runtime_dir()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, server, max_tokens=1000, ignore_eos=True) for _ in range(4)]
        # asked for one after the other on a busy machine, the first may be over when the last comes
        server.until(lambda metrics: sum(metrics["segue_requests"].values()) + finished(metrics) == 4)
        if to_group:
            os.killpg(server.process.pid, number)
        else:
            server.process.send_signal(number)
        for answer in answers:
            assert len(ids_of(answer.result())["thinker"]) == 1000
    assert server.process.wait(120) == 0, server.log()
    assert_gone(family, directory)
    assert "Traceback" not in server.log()


@pytest.mark.nightly
def test_what_does_not_end_in_time_is_told_so(model: Path, tmp_path: Path) -> None:
    """Whole answers and streams alike; and nothing of it is a mistake in the log."""
    config = tmp_path / "short.yaml"
    config.write_text("limits: {drain_seconds: 0.1}")
    with served(model, "--drain-seconds", "0.1", "--config", str(config)) as server, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, server, **LONG, stream=stream) for stream in (False, True, False, True)]
        server.until(lambda metrics: sum(metrics["segue_requests"].values()) == 4)
        server.process.send_signal(signal.SIGTERM)
        for stream, answer in zip((False, True, False, True), answers, strict=True):
            got = answer.result()
            assert got.status_code == (200 if stream else 503)
            last = got.text.strip().splitlines()[-1].removeprefix("data: ")
            assert json.loads(last)["error"]["code"] == "shutting_down"
        assert server.process.wait(120) == 0, server.log()
        assert "Traceback" not in server.log()


@pytest.mark.nightly
def test_responses_in_the_background_end_with_the_server(model: Path, tmp_path: Path) -> None:
    """Who listens hears of it; for those that nobody listens to, it does not wait."""
    config = tmp_path / "short.yaml"
    config.write_text("limits: {drain_seconds: 0.1}")
    asked = {"model": NAME, "input": "a", "background": True, "ignore_eos": True, "max_output_tokens": 20_000}
    for seconds, listens in (("0.1", True), ("240", False)):
        with served(model, "--drain-seconds", seconds, "--config", str(config)) as server, server.client() as http:
            if listens:
                with http.stream("POST", "/v1/responses", json={**asked, "stream": True}) as answer:
                    lines = answer.iter_lines()
                    while "response.output_text.delta" not in next(lines):
                        pass
                    server.process.send_signal(signal.SIGTERM)
                    last = json.loads([line for line in lines if line][-1].removeprefix("data: "))
                assert last["type"] == "response.failed"
                assert last["response"]["error"]["message"] == "the server is shutting down"
            else:
                name = http.post("/v1/responses", json=asked).json()["id"]
                server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(120) == 0, server.log()
            assert "Traceback" not in server.log()
            if not listens:
                assert f"1 responses in the background end with the server: {name}" in server.log()


def test_a_second_signal_ends_it_at_once(server: Served) -> None:
    family, directory = server.family(), server.runtime_dir()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, **LONG)
        server.until(lambda metrics: sum(metrics["segue_requests"].values()) == 1)
        server.process.terminate()
        server.process.terminate()
        # two signals of one number that come together are one: go on until it is noticed
        while server.process.poll() is None:
            server.process.terminate()
        assert server.process.returncode != 0
        assert answer.exception() is not None or answer.result().status_code == 503
    assert_gone(family, directory)


def test_a_signal_while_it_starts(model: Path) -> None:
    server = Served(model, "--port", "0")
    try:
        started = psutil.Process(server.process.pid)
        while not any("segue.worker" in child.cmdline() for child in started.children()):
            assert server.process.poll() is None, server.log()
        family, directory = started.children(recursive=True), server.runtime_dir()
        server.process.terminate()
        assert server.process.wait(120) == 0, server.log()
        assert_gone(family, directory)
        assert "Traceback" not in server.log()
    finally:
        server.close()


@pytest.mark.nightly
def test_the_log_of_a_start_has_a_line_per_worker(server: Served) -> None:
    stages = server.health()["stages"]
    inputs = len(stages["input"]["replicas"])
    lines = [line for line in server.log().splitlines() if "[transformers]" not in line]
    assert sorted(line.partition(" info    ")[2] for line in lines if "ready" in line) == [
        *(f"input.{number}-1 is ready" for number in range(inputs)),
        "output.0-1 is ready",
        "talker.0-1 is ready",
        "thinker.0-1 is ready",
        "vocoder.0-1 is ready",
    ]
    assert not [line for line in lines if "\r" in line or "/health" in line or "%|" in line]


def remove(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(data) and None


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda model: os.truncate(model / name, size)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing shard": (remove("model-00002-of-00003.safetensors"), "'model-00002-of-00003.safetensors', which is not"),
    "an empty shard": (
        cut("model-00003-of-00003.safetensors", 0),
        "model-00003-of-00003.safetensors: the weights cannot be loaded",
    ),
    "a broken config": (write("config.json", b"{nope"), "config.json: not JSON"),
    "a config of another model": (write("config.json", b'{"architectures": ["Bert"]}'), "no family serves"),
    "half a config": (
        write("config.json", b'{"architectures": ["Qwen2_5OmniForConditionalGeneration"]}'),
        "has no 'thinker_config'",
    ),
    "a broken tokenizer": (write("tokenizer.json", b"{nope"), "tokenizer"),
    "no voices": (remove("spk_dict.pt"), "spk_dict.pt: not there"),
    "broken voices": (write("spk_dict.pt", b"nope"), "spk_dict.pt: cannot be read"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case == "a missing shard" else pytest.mark.nightly) for case in BROKEN],
)
def test_a_broken_checkpoint_is_one_line_and_an_exit(model: Path, tmp_path: Path, case: str) -> None:
    broken, text = BROKEN[case]
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    broken(copy)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a long path would not be taken: sockets go there
        done = segue("serve", str(copy), "--port", "0", TMPDIR=short)
        assert not list(Path(short).glob("segue-*"))
    assert done.returncode == 2
    assert not done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("segue: error: ")]
    assert len(errors) == 1, done.stderr
    assert text in errors[0]
    assert "Traceback" not in done.stderr


def test_a_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = segue("serve", str(model), "--port", port)
    assert done.returncode == 2
    assert f"port {port}: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--config", "/nowhere.yaml"], "'/nowhere.yaml' is not a file"),
        (["--port", "70000"], "a port is from 0"),
        (["--host", "nowhere.invalid"], "cannot listen on host 'nowhere.invalid'"),
    ],
)
def test_impossible_settings(model: Path, arguments: list[str], text: str) -> None:
    done = segue("serve", str(model), "--port", "0", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_model_there() -> None:
    done = segue("serve", "/nowhere")
    assert done.returncode == 2
    assert done.stderr == "segue: error: no checkpoint at '/nowhere': that is not a directory\n"


@pytest.mark.nightly
def test_every_line_of_the_log_is_an_object(model: Path) -> None:
    """Those of a worker, too: what a stage raised, with its traceback."""
    with served(model, "--log-format", "json") as server:
        with server.client() as http:
            assert http.post("/v1/chat/completions", json=body()).status_code == 200
        psutil.Process(server.pid("thinker")).kill()
        server.until(lambda metrics: server.health()["stages"]["thinker"]["replicas"][0]["restarts"] == 1)
        lines = [json.loads(line) for line in server.log().splitlines()]
    assert {"input.0-1 is ready", "request"} <= {line["message"] for line in lines}
    assert any("SIGKILL" in line["message"] and line["level"] == "warning" for line in lines)
