"""The files of deploy/ agree with the server they start."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_blocks import ROOT
from starlette.datastructures import Headers

from segue.cli.main import parser
from segue.graph.deployment.deployment import Limits
from segue.server.http.errors import UnknownHost
from segue.server.http.sites import Sites
from segue.server.settings import ServerSettings

DEPLOY = ROOT / "deploy"
IMAGES = sorted(DEPLOY.glob("*.Dockerfile"))


def test_images_start_the_server() -> None:
    """With options that it has; and what they copy is there."""
    assert len(IMAGES) == 2
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for image in IMAGES:
        text = image.read_text()
        [command] = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
        assert parser().parse_args(shlex.split(command.strip("[]").replace(",", " "))).host == "0.0.0.0"
        copied = [name for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for name in line.split()]
        assert set(copied) == sent
        assert all((ROOT / name).exists() for name in copied)


@pytest.mark.needs("hadolint")
@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_images_are_written_as_the_linter_wants_them(image: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "--no-color", image], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_unit_starts_the_server_and_waits_until_it_has_drained() -> None:
    unit = (DEPLOY / "segue@.service").read_text()
    [started] = re.findall(r"^ExecStart=\S+/segue (.*) \$OPTIONS$", unit, re.MULTILINE)
    assert parser().parse_args(started.split()).log_format == "json"
    drains = parser().parse_args(["serve", "."]).drain_seconds + Limits().drain_seconds
    waits = [int(seconds) for seconds in re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)]
    waits += [int(seconds) for image in IMAGES for seconds in re.findall(r"--stop-timeout (\d+)", image.read_text())]
    assert len(waits) == 3
    assert min(waits) > drains


def test_the_proxy_takes_what_the_server_takes() -> None:
    [size] = re.findall(r"client_max_body_size (\d+)m;", (DEPLOY / "nginx.conf").read_text())
    assert int(size) << 20 == ServerSettings().max_body_bytes


def test_the_unit_keeps_what_is_compiled_where_it_may_write() -> None:
    """Triton's home is the user's by default, Segue's cache of Inductor in XDG_CACHE_HOME, CUDA's own in HOME."""
    unit = (DEPLOY / "segue@.service").read_text()
    [writable] = re.findall(r"^CacheDirectory=(.*)$", unit, re.MULTILINE)
    environment = [
        assignment.split("=", 1)
        for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
        for assignment in line.split()
    ]
    assert {name for name, value in environment if value == f"/var/cache/{writable}"} == {
        "HOME",
        "TRITON_HOME",
        "XDG_CACHE_HOME",
    }


def test_the_server_answers_to_the_host_that_the_proxy_sends() -> None:
    """An address as it is; a name with the option that the unit shows. The proxy's own pages are no other site's."""
    proxy = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())
    [server] = re.findall(r"^server \{\n(.*)^\}", proxy, re.MULTILINE | re.DOTALL)
    # a location that set one header would inherit none
    assert not re.search(r"location[^{]*\{[^}]*proxy_set_header", server)
    [host] = re.findall(r"proxy_set_header Host (\S+);", server)
    unit = (DEPLOY / "segue@.service").read_text()
    [options] = re.findall(r"^#\s+OPTIONS=(.*)$", unit, re.MULTILINE)
    [name] = parser().parse_args(["serve", ".", *shlex.split(options)]).allowed_host
    sites = Sites(ServerSettings(allowed_hosts=frozenset({name})))
    for called in ("10.0.0.5", "10.0.0.5:8080", name, f"{name}:8080"):
        sent = host.replace("$http_host", called).replace("$host", called.partition(":")[0])
        sites.check("POST", Headers({"host": sent, "origin": f"http://{called}"}))
    with pytest.raises(UnknownHost):
        Sites(ServerSettings()).check("POST", Headers({"host": host.replace("$http_host", name)}))
