"""Starting and stopping: real processes, real signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from segue.messages.errors import ConfigError
from segue.server.serve import listen

HERE = Path(__file__).parent
BODY = {"model": "fake-omni", "messages": [{"role": "user", "content": "x"}], "stream": True}


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server and its URL."""
    source = os.pathsep.join([str(HERE.parents[2] / "src"), str(HERE.parent)])
    started = subprocess.Popen(
        [sys.executable, str(HERE / "serve_script.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    with started:
        assert started.stdout is not None
        yield started, started.stdout.readline().strip()
        started.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end_and_then_the_stages_stop(
    process: tuple[subprocess.Popen[str], str], number: int
) -> None:
    server, url = process
    assert server.stdin is not None
    assert server.stdout is not None
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY, timeout=120) as answer:
        lines = answer.iter_lines()
        assert "assistant" in next(lines)
        server.send_signal(number)
        # once it has stopped accepting, the running request still goes on
        while True:
            try:
                socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=120).close()
            except (ConnectionRefusedError, ConnectionResetError):
                break
        server.stdin.write("go on\n")
        server.stdin.flush()
        rest = [line for line in lines if line]
    assert any("and ended" in line for line in rest)
    assert rest[-1] == "data: [DONE]"
    assert server.stdout.readline() == "stages stopped\n"
    assert server.wait(120) == 0


def test_an_idle_server_stops_at_once(process: tuple[subprocess.Popen[str], str]) -> None:
    server, url = process
    assert httpx.get(f"{url}/health", timeout=120).status_code == 200
    server.send_signal(signal.SIGTERM)
    assert server.wait(120) == 0


def test_an_address_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on host '127.0.0.1', port {port}: .*in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70_000), ("192.0.2.1", 0)])
def test_an_impossible_address_is_named(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(host, port)


def test_small_events_are_not_held_back_by_nagle() -> None:
    with listen("127.0.0.1", 0) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_server_imports_no_torch() -> None:
    source = os.pathsep.join([str(HERE.parents[2] / "src"), str(HERE.parent)])
    code = (
        "import sys; import segue.server.serve; "
        "sys.exit(bool({'torch', 'transformers', 'torchvision'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": source})
