"""Estimate, before anything starts, which passes fit into memory and how long they take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from segue.graph.deployment.deployment import Hardware
from segue.graph.stage_graph import BUILT_IN
from segue.verify.questions import Question, sampling_stages
from segue.verify.subject import Subject

GiB = 1 << 30
HEADROOM = {"cpu": 1.35, "cuda": 1.15}
"""Factor on the weights' bytes, for other buffers, activations and the KV cache of short requests."""
RESERVE = 2 * GiB
"""Bytes of the libraries themselves, in host or GPU memory."""
_START_SECONDS = 15
"""Time to import the libraries and start the processes, on each side."""


@dataclass(frozen=True)
class Pass:
    """A comparison in one dtype."""

    dtype: str
    needs: int
    """Bytes of memory."""
    left_out: str | None = None
    """Why it is not run."""


def passes(subject: Subject, hardware: Hardware, device: str, wanted: list[str], ranks: int = 1) -> list[Pass]:
    """Plan the passes. `wanted`: dtypes; empty: the checkpoint's own, and float32. `ranks`: GPUs per stage of Segue."""
    have = room(hardware, device, ranks) if device == "cuda" else available_memory(hardware)
    where = "of memory available"
    if device == "cuda":
        where = "of GPU memory"
        if len(hardware.gpus) > ranks:
            where += f" on {ranks} of {len(hardware.gpus)} GPUs; --tensor-parallel N lets Segue use more"
    made = []
    for dtype in dict.fromkeys(wanted or [subject.dtype, "float32"]):
        needs = needed(subject, dtype, device)
        reason = None
        if needs > have > 0:  # 0: the GPU's memory is unknown
            reason = f"needs about {needs / GiB:.1f} GiB, and there are {have / GiB:.1f} GiB {where}"
            if device == "cuda" and needs < available_memory(hardware):
                reason += f"; --device cpu --dtype {dtype} would run it in the host's memory, slowly"
        made.append(Pass(dtype, needs, reason))
    return made


def needed(subject: Subject, dtype: str, device: str) -> int:
    """Return the bytes that a pass needs."""
    return int(subject.weight_bytes(dtype) * HEADROOM[device]) + RESERVE


def room(hardware: Hardware, device: str, ranks: int = 1) -> int:
    """Return the bytes to which Segue's memory shares refer: the machine's, or those of the smallest GPU times a
    stage's ranks (without ranks a stage uses one GPU; the library uses all). 0: the GPU's memory is unknown."""
    return hardware.memory_bytes if device == "cpu" else ranks * min(hardware.gpus)


def memory_shares(
    subject: Subject, hardware: Hardware, device: str, dtype: str, ranks: int = 1
) -> dict[str, dict[str, float]]:
    """Return the `memory_share` of every stage. Unlike Segue's defaults, which know no sizes, each autoregressive stage
    gets its weights plus, for caches, its part of half of the pass's remaining memory."""
    size = room(hardware, device, ranks)
    if not size:
        return {}
    used = {one.name: subject.stage_bytes(one.name, dtype) for one in sampling_stages(subject)}
    if not used:
        return {}
    needs = needed(subject, dtype, device)
    caches = (max(needs, int(0.9 * size) if device == "cuda" else 0) - subject.weight_bytes(dtype)) // 2
    total = sum(used.values())
    shares = {name: min(1.0, (bytes_ + caches * bytes_ / total) / size) for name, bytes_ in used.items()}
    others = [name for name in subject.graph.stages if name not in used and name not in BUILT_IN]
    rest = (1.0 - sum(shares.values())) / (len(others) + 1)
    shares |= dict.fromkeys(others, rest)
    return {name: {"memory_share": share} for name, share in shares.items() if share > 0}


def available_memory(hardware: Hardware) -> int:
    """Return the bytes that the kernel has available now, within this process's cgroup."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min(hardware.memory_bytes, available)


def minutes(subject: Subject, run: list[Pass], asked: list[Question], device: str) -> tuple[float, float]:
    """Return (least, most) minutes of all passes: reading the weights twice, at the rate measured on the first file,
    and computing at the rate of this machine's memory and of a matmul in numpy. A GPU is assumed to be twenty times
    as fast. The range is an estimate within a factor of two."""
    faster = 20.0 if device == "cuda" else 1.0
    bytes_per_second, operations = _copy_rate() * faster, _matmul_rate() * faster
    disk = _read_rate(subject.files[0])
    stored = sum(path.stat().st_size for path in subject.files)
    seconds = 0.0
    for one in run:
        weights = subject.weight_bytes(one.dtype)
        seconds += 2 * (_START_SECONDS + stored / disk)
        seconds += sum(_passes_over(question) for question in asked) * 3 * weights / bytes_per_second
        seconds += sum(_prefilled(question) for question in asked) * 3 * 2 * subject.floats / operations
    return seconds / 60 / 1.5, seconds / 60 * 2


def _passes_over(question: Question) -> float:
    """Return how often the weights are read, by one token or step at a time."""
    sampling = question.prompt.get("sampling", {})
    return sum(float(one["max_tokens"]) for one in sampling.values()) / max(1, len(sampling)) or 1.0


def _prefilled(question: Question) -> float:
    """Return the order of magnitude of tokens in large matmuls: of the prompt, or of the latents in every step."""
    steps = question.prompt.get("num_inference_steps")
    if steps is None:
        return 400.0
    latents = question.prompt["height"] * question.prompt["width"] / 256 * question.prompt.get("num_frames", 1)
    return float(2 * steps * (latents + 100))


def _copy_rate() -> float:
    """Measure a copy in bytes per second."""
    source = np.ones(1 << 25, np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    began = time.perf_counter()
    np.copyto(target, source)
    return source.nbytes / (time.perf_counter() - began)


def _matmul_rate(size: int = 768) -> float:
    """Measure a matmul in operations per second."""
    a = np.ones((size, size), np.float32)
    _ = a @ a
    began = time.perf_counter()
    _ = a @ a
    return 2.0 * size**3 / (time.perf_counter() - began)


def _read_rate(path: Path, most: int = 1 << 27) -> float:
    """Measure reading the start of a file in bytes per second."""
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        read = len(file.read(most))
    return max(1.0, read / max(1e-6, time.perf_counter() - began))
