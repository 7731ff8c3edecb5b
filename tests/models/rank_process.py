"""The second rank of a group: a process that follows one leader after the other.

`python rank_process.py FD`: over the socket FD come jobs (JSON, with the socket for orders); after each, what it held.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.parallel.follower import follow
from segue.engines.autoregressive.parallel.ranks import Leader
from segue.graph.deployment.options import LoraPlan
from segue.models.omni.multimodal_lm.llm import LLM as MediaLLM
from segue.models.omni.qwen2_5_omni import talker, thinker
from segue.models.omni.qwen3_omni import talker as talker3
from segue.models.omni.qwen3_omni import thinker as thinker3
from segue.models.text.causal_lm.llm import LLM
from segue.parallel.group import Group
from segue.parallel.orders import Crew

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


class Second:
    """The test's side."""

    weight_bytes: int
    """Of the last follower."""

    def __init__(self, directory: Path) -> None:
        """`directory`: an empty one."""
        self._directory = directory
        self._jobs = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
    ) -> Iterator[Leader]:
        """A leader over `ours`, with a follower over the same checkpoint or another of the same shape."""
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
        orders, far = socket.socketpair()
        with far:
            socket.send_fds(self._control, [json.dumps(job).encode()], [far.fileno()])
        crew = Crew([orders])
        try:
            yield Leader(*rank(ours, 0, meeting, load_format, quantization, lora, stage), crew)
        finally:
            crew.close()
            self.weight_bytes = json.loads(self._control.recv(4096))["weight_bytes"]

    def close(self) -> None:
        self._control.close()
        self._process.wait(timeout=240)


def main() -> None:
    torch.set_num_threads(1)
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, fds, _, _ = socket.recv_fds(control, 4096, 1)
        if not data:
            return
        job = json.loads(data)
        with socket.socket(fileno=fds[0]) as orders:
            directory, meeting = (Path(job.pop(name)) for name in ("directory", "meeting"))
            adapter, group = rank(directory, 1, meeting, **job)
            follow(adapter, group, orders, None)
        control.send(json.dumps({"weight_bytes": adapter.weight_bytes}).encode())


if __name__ == "__main__":
    main()
