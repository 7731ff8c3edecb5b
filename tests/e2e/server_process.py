"""`segue serve` on the tiny checkpoint, as an operator starts it: a process, its port, its children, its numbers."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from segue.models.registry import tiny_preset

SOURCE = Path(__file__).parents[2] / "src"
ASSETS = Path(__file__).parents[2] / "assets"
NAME = "tiny"
HELLO = [{"role": "user", "content": "hello"}]

Metrics = dict[str, dict[tuple[tuple[str, str], ...], float]]


HOLDINGS = (
    "segue_requests",
    "segue_generations_in_flight",
    "segue_stage_requests",
    "segue_stage_blocks_used",
    "segue_stage_waiting",
    "segue_stage_running",
    "segue_stage_retained_bytes",
    "segue_stage_spilled_bytes",
    "segue_stage_pool_bytes",
    "segue_stage_coming_chunks",
    "segue_stage_early_chunks",
    "segue_edge_in_flight_bytes",
    "segue_edge_pending_chunks",
    "segue_edge_flows",
)
"""Everything that must be zero when no request is there."""


def environment(**more: str) -> dict[str, str]:
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}


def segue(*arguments: str, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
    """One command, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "segue.cli", *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def tiny(directory: Path, family: str, size: str = "tiny") -> Path:
    """A checkpoint as `segue tiny` makes it, into `directory`; here, where torch has been read already."""
    tiny_preset(family).make(directory, size, 0)
    return directory


@contextmanager
def models_of_graph(directory: Path, *families: str) -> Iterator[Path]:
    """Tiny checkpoints in directories of their families' names, where graphs of several models look for them."""
    for family in families:
        tiny(directory / family, family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELS", str(directory))
        yield directory


class Served:
    """A running server."""

    def __init__(self, model: Path, *arguments: str) -> None:
        self.model = model
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "segue.cli", "serve", str(model), "--port", "0", "--name", NAME, *arguments],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.url = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " is served at " in line, self.log()
        self.url = line.split()[-1]

    def log(self) -> str:
        self._log.flush()
        with open(self._log.fileno(), closefd=False) as file:
            file.seek(0)
            return file.read()

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=240, **settings)

    def health(self) -> dict[str, Any]:
        with self.client() as http:
            return http.get("/health").json()

    def pid(self, stage: str) -> int:
        return int(self.health()["stages"][stage]["replicas"][0]["pid"])

    def family(self) -> list[psutil.Process]:
        """The server, its fork server, its workers."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def fork_server(self) -> psutil.Process:
        """Forked by the server, it is what it is only once it runs its own program."""
        [one] = [child for child in psutil.Process(self.process.pid).children() if "segue.worker" in child.cmdline()]
        return one

    def runtime_dir(self) -> Path:
        arguments = self.fork_server().cmdline()
        return Path(arguments[arguments.index("segue.worker") + 2])

    def metrics(self) -> Metrics:
        with self.client() as http:
            answer = http.get("/metrics")
        assert answer.status_code == 200
        found: Metrics = {}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                rows = found.setdefault(sample.name, {})
                labels = tuple(sorted(sample.labels.items()))
                assert labels not in rows, f"{sample.name}{labels} is there twice"
                rows[labels] = sample.value
        return found

    def until(self, true: Callable[[Metrics], bool], within: float = 240) -> Metrics:
        """Ask for the numbers until they are so. `within`: seconds, against hanging for ever; no promise."""
        end = time.monotonic() + within
        while True:
            metrics = self.metrics()
            if true(metrics):
                return metrics
            if time.monotonic() > end:
                raise AssertionError(f"not so within {within} s: {metrics}")

    def until_empty(self, names: Iterable[str] = HOLDINGS) -> Metrics:
        return self.until(lambda metrics: not any(held(metrics, names).values()))

    @contextmanager
    def nobody_finishes(self, names: Iterable[str] = HOLDINGS) -> Iterator[None]:
        """What is begun inside is over soon after: cancelled, and not because it was made to its end."""
        before = finished(self.until_empty(names))
        yield
        assert finished(self.until_empty(names)) == before, "a request went on without its client"

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


def held(metrics: Metrics, names: Iterable[str] = HOLDINGS) -> dict[str, float]:
    return {f"{name}{dict(labels)}": value for name in names for labels, value in metrics[name].items()}


def finished(metrics: Metrics) -> float:
    """Generations that came to their end."""
    ends = metrics.get("segue_generations_total", {})
    return sum(count for labels, count in ends.items() if dict(labels)["end"] in ("stop", "length"))


@contextmanager
def served(model: Path, *arguments: str) -> Iterator[Served]:
    server = Served(model, *arguments)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def body(**fields: Any) -> dict[str, Any]:
    """A small greedy request."""
    return {"model": NAME, "messages": HELLO, "max_tokens": 8, "temperature": 0, "seed": 1, **fields}


def spoken(**fields: Any) -> dict[str, Any]:
    """The same, with speech."""
    return body(
        modalities=["text", "audio"],
        sampling={"talker": {"temperature": 0, "max_tokens": 30}},
        return_token_ids=True,
        **fields,
    )


def ids_of(answer: httpx.Response) -> dict[str, list[int]]:
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice.get("segue", {}).get("token_ids") or {"thinker": choice["token_ids"]}


def pixels(encoded: str | None) -> np.ndarray:
    """[height, width, channels] of an image in base64."""
    assert encoded is not None
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
        return np.asarray(image).astype(int)
