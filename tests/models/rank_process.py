"""The second rank of a group: a process that runs what the test's process runs.

`python rank_process.py FD`: over the socket FD come jobs (JSON). One loads a rank's part of a checkpoint; then come
engines to run (each with a socket to rank 0) and functions to call with the stage model, until the last.
"""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.engines.ranks import Leading, LedAdapters, follow
from segue.graph.deployment.options import LoraPlan
from segue.models.omni.multimodal_lm.llm import LLM as MediaLLM
from segue.models.omni.qwen2_5_omni import talker, thinker
from segue.models.omni.qwen3_omni import talker as talker3
from segue.models.omni.qwen3_omni import thinker as thinker3
from segue.models.text.causal_lm.llm import LLM
from segue.parallel.group import Group
from segue.parallel.ranks import Ranks

CPU = torch.device("cpu")
STAGES: dict[tuple[str, str], Any] = {
    ("qwen2_5_omni", "thinker"): thinker.Thinker,
    ("qwen2_5_omni", "talker"): talker.Talker,
    ("qwen3_omni_moe", "thinker"): thinker3.Thinker,
    ("qwen3_omni_moe", "talker"): talker3.Talker,
}
"""(model type, stage) → the stage model."""


def rank(
    directory: Path,
    number: int,
    meeting: Path,
    load_format: str,
    quantization: str = "none",
    lora: dict[str, str] | None = None,
    stage: str = "llm",
) -> tuple[Any, Group]:
    """This rank's part of a checkpoint: a causal LM, or one that sees or hears, or a stage of an omni model. `lora`:
    directories of adapters by name."""
    group = Group(number, 2, meeting, CPU)
    context = AutoregressiveContext(
        directory,
        stage,
        CPU,
        torch.float32,
        load_format=load_format,
        group=group,
        quantization=quantization,
        lora=None if lora is None else LoraPlan(lora),
    )
    config = json.loads((directory / "config.json").read_text())
    if (kind := (config["model_type"], stage)) in STAGES:
        return STAGES[kind](context), group
    return (MediaLLM if {"vision_config", "audio_config"} & config.keys() else LLM)(context), group


class Audited(Leading):
    """Rank 0's engine for tests that look into it."""

    def audit(self) -> None:
        self.inner.audit()  # type: ignore[attr-defined]

    @property
    def resources(self) -> Any:
        return self.inner.resources  # type: ignore[attr-defined]


class Led:
    """A stage model of two ranks, of which this is rank 0's part; its attributes are that part's."""

    def __init__(self, model: Any, group: Group, control: socket.socket) -> None:
        self.model = model
        self.lora: LedAdapters | None = None
        """Of the last engine."""
        self._group = group
        self._control = control
        self._ranks: list[Ranks] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def engine(
        self, config: AutoregressiveConfig, *, ahead: bool | None = None, speculation: Speculation | None = None
    ) -> Audited:
        """Rank 0's engine, while the other rank runs the same. It ends the one before."""
        config = replace(config, enforce_eager=True)
        self.end()
        near, far = socket.socketpair()
        job = {"config": asdict(config), "ahead": ahead, "drafts": None if speculation is None else speculation.tokens}
        with far:
            socket.send_fds(self._control, [json.dumps(job).encode()], [far.fileno()])
        self._ranks.append(Ranks(self._group, [near]))
        made = AutoregressiveEngine(self.model, config, speculation=speculation, ahead=ahead, ranks=self._ranks[-1])
        self.lora = None if getattr(self.model, "lora", None) is None else LedAdapters(self.model.lora, self._ranks[-1])
        return Audited(made, self._ranks[-1])

    def both(self, function: Callable[..., Any], *given: Any) -> Any:
        """What a function of a test's module gives here, with the stage model and these plain values, while the other
        rank calls it too."""
        self.end()
        where = {"module": function.__module__, "name": function.__name__, "path": sys.path}
        self._control.send(json.dumps({**where, "given": given}).encode())
        result = function(self.model, *given)
        assert json.loads(self._control.recv(4096)) == "done"
        return result

    def end(self) -> None:
        """End the engine that runs, if one does."""
        for ranks in self._ranks:
            ranks.close()
            assert json.loads(self._control.recv(4096)) == "done"
        self._ranks = []


class Second:
    """The test's side."""

    weight_bytes: int
    """Of the last follower."""

    def __init__(self, directory: Path) -> None:
        """`directory`: an empty one."""
        self._directory = directory
        self._jobs = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(240)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    @contextmanager
    def led(
        self,
        ours: Path,
        theirs: Path | None = None,
        load_format: str = "auto",
        quantization: str = "none",
        lora: dict[str, str] | None = None,
        stage: str = "llm",
    ) -> Iterator[Led]:
        """Two ranks over `ours`, or the second one over another checkpoint of the same shape."""
        self._jobs += 1
        meeting = self._directory / f"meeting{self._jobs}"
        job = {
            "directory": str(theirs or ours),
            "meeting": str(meeting),
            "load_format": load_format,
            "quantization": quantization,
            "lora": lora,
            "stage": stage,
        }
        self._control.send(json.dumps(job).encode())
        led = Led(*rank(ours, 0, meeting, load_format, quantization, lora, stage), self._control)
        try:
            yield led
        finally:
            led.end()
            self._control.send(json.dumps({}).encode())
            self.weight_bytes = json.loads(self._control.recv(4096))["weight_bytes"]

    def close(self) -> None:
        self._control.close()
        self._process.wait(timeout=240)


@torch.inference_mode()
def run(adapter: Any, group: Group, job: dict[str, Any], fds: list[int]) -> None:
    """One engine, or one function."""
    if "name" in job:
        called(job["module"], job["name"], job["path"])(adapter, *job["given"])
        return
    with socket.socket(fileno=fds[0]) as end:
        ranks = Ranks(group, [end])
        speculation = None if job["drafts"] is None else Speculation(None, job["drafts"])
        config = AutoregressiveConfig(**job["config"])
        engine = AutoregressiveEngine(adapter, config, speculation=speculation, ahead=job["ahead"], ranks=ranks)
        follow(engine, ranks, getattr(adapter, "lora", None))


def called(module: str, name: str, path: list[str]) -> Any:
    """A function of a test's module. `path`: where the test's process finds modules."""
    sys.path += [folder for folder in path if folder not in sys.path]
    return getattr(importlib.import_module(module), name)


def main() -> None:
    torch.set_num_threads(1)
    control = socket.socket(fileno=int(sys.argv[1]))
    adapter: Any = None
    while data := (received := socket.recv_fds(control, 1 << 16, 1))[0]:
        job = json.loads(data)
        if "directory" in job:
            directory, meeting = (Path(job.pop(name)) for name in ("directory", "meeting"))
            adapter, group = rank(directory, 1, meeting, **job)
        elif job:
            run(adapter, group, job, received[1])
            control.send(json.dumps("done").encode())
        else:
            control.send(json.dumps({"weight_bytes": adapter.weight_bytes}).encode())
            adapter = group = None


if __name__ == "__main__":
    main()
