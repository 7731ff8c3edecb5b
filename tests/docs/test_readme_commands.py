"""`make readme` ends, and says so, when what it runs fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import readme_commands

SERVER = """
import signal, sys
status = int(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a shell ignores it
{ignored}
try:
    print("it is served at", "http://127.0.0.1:" + sys.argv[2], flush=True)
    while True:
        signal.pause()
except KeyboardInterrupt:
    sys.exit(status)
"""


def made(tmp_path: Path, status: int, ignored: str = "") -> str:
    """A command of make that serves, and ends with `status` when it is interrupted."""
    (tmp_path / "server.py").write_text(SERVER.format(ignored=ignored))
    makefile = tmp_path / "Makefile"
    makefile.write_text(f"serve:\n\t@{sys.executable} {tmp_path}/server.py {status} $(PORT)\n")
    return f"make -f {makefile} serve"


def test_the_server_ends_when_a_command_fails(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError), readme_commands.serving(made(tmp_path, 0)):
        readme_commands.run("false")


def test_the_server_must_end_well(tmp_path: Path) -> None:
    with readme_commands.serving(made(tmp_path, 0)):
        pass
    with pytest.raises(SystemExit, match="ended with 2"), readme_commands.serving(made(tmp_path, 3)):
        pass


def test_a_server_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_commands, "ENDED_SECONDS", 0.1)
    command = made(tmp_path, 0, "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    with pytest.raises(subprocess.TimeoutExpired), readme_commands.serving(command):
        pass
