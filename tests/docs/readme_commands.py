"""Runs the commands of README.md one after the other, as a reader types them: `make readme`. `make test` is left out:
CI runs it by itself; ports are free ones. test_docs.py runs what the README says in Python."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from markdown_blocks import ROOT, blocks, prose

README = ROOT / "README.md"
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
SERVED = "http://localhost:8000"
TRACKED = ("src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
"""What an installation is made of."""
ENDED_SECONDS = 90.0
"""More than a server takes to drain."""
UNREACHED: re.Pattern[str] = runpy.run_path(str(ROOT / "tests" / "package_index.py"))["UNREACHED"]


def commands() -> list[str]:
    found: list[str] = []
    for block in blocks(README):
        if block.language == "sh" and block.body.startswith("curl"):
            found.append(block.body)
        elif block.language == "sh":
            found += [line.partition("  #")[0].strip() for line in block.body.splitlines()]
    return found


def run(command: str, directory: Path = ROOT, path: Path | None = None) -> None:
    print(f"$ {command}", flush=True)
    environment = ENVIRONMENT if path is None else {**ENVIRONMENT, "PATH": f"{path}{os.pathsep}{ENVIRONMENT['PATH']}"}
    started = time.monotonic()
    subprocess.run(["bash", "-euc", command], cwd=directory, env=environment, check=True)
    print(f"  {time.monotonic() - started:.0f} s", flush=True)


@contextmanager
def serving(command: str) -> Iterator[str]:
    """`make serve` until it is ready; its URL. Interrupted at the end, as with Ctrl-C, it must end with status 0 in
    `ENDED_SECONDS`; if not, it is killed. It ends when a command fails, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(f"$ {command} PORT={port}", flush=True)
    with subprocess.Popen(
        [*command.split(), f"PORT={port}"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if " is served at " in line), None)
            if line is None:
                sys.exit(f"{command}: ended with {process.wait()} before it was ready")
            yield line.split()[-1]
        finally:
            interrupt(process)
            try:
                process.communicate(timeout=ENDED_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    if process.returncode != 0:
        sys.exit(f"{command}: ended with {process.returncode} when it was interrupted")


def interrupt(make: subprocess.Popen[str]) -> None:
    """What make runs, as Ctrl-C does; but not make, which tells the status of its command only where it is not."""
    if make.poll() is None:
        for process in psutil.Process(make.pid).children(recursive=True):
            with suppress(ProcessLookupError):  # ended since
                if os.getpgid(process.pid) == make.pid:
                    os.kill(process.pid, signal.SIGINT)


def install(command: str) -> None:
    """In an environment of its own, which has the packages of this one, but not Segue."""
    with tempfile.TemporaryDirectory() as temporary:
        source, own = Path(temporary) / "source", Path(temporary) / "own"
        for name in TRACKED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "*.egg-info"))
            else:
                shutil.copy(ROOT / name, source / name)
        subprocess.run([sys.executable, "-m", "venv", own], check=True)
        [packages] = own.glob("lib/python*/site-packages")
        [here] = {path for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages")}
        (packages / "over.pth").write_text(f"{here}\n")
        log = Path(temporary) / "pip.log"
        try:
            run(f"export PIP_LOG={log}; {command}", source, own / "bin")
        except subprocess.CalledProcessError:
            if not (log.exists() and UNREACHED.search(log.read_text())):
                raise
            print(f"WARNING: the index of packages was not reached; not tried: {command}", flush=True)
            return
        run(f"{own}/bin/segue --help > /dev/null", Path(temporary))
        [module] = own.glob("lib/python*/site-packages/segue/cli/main.py")
        print(f"  {module.relative_to(own)}")


def main() -> None:
    asked = [command for command in commands() if command != "make test"]
    place = asked.index("make serve")
    for command in asked[:place]:
        run(command)
    later = asked[place + 1 :]
    with serving(asked[place]) as url:
        for command in later:
            if command.startswith("curl"):
                run(command.replace("curl ", "curl --fail --silent --show-error ", 1).replace(SERVED, url))
                print()
    for command in later:
        if not command.startswith("curl"):
            run(command)
    installations = re.findall(r"`(pip install [^`]*)`", prose(README).replace("\n", " "))
    assert installations
    for command in installations:
        install(command)


if __name__ == "__main__":
    main()
