"""Measure the attention of one decode step alone: gigabytes of keys and values read per second, by backend and batch.

A layer has Qwen2.5-7B's shape: 28 heads of dimension 128 over 4 key/value heads. Every sequence has its own blocks, so
no sequence reads data that another one brought into the device's cache. With `--tiles`, `triton` runs besides with
other tiles, pipeline stages and numbers of splits than its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import msgspec
import torch

from segue.bench.harness.device import best
from segue.bench.steps.arguments import AttentionBench
from segue.engines.autoregressive.contract import KVSpec
from segue.kernels.attention.backends.choose import attention_backend
from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.paged_attention import TORCH
from segue.kernels.attention.paged_step import AttentionBackend, Part, paged_step
from segue.kernels.kv.store import KVStore
from segue.parallel.wire import dtype_of

HEADS, KV_HEADS, WIDTH, BLOCK = 28, 4, 128, 16
LEVELS = {
    f"{count} x {length}": (length,) * count
    for count in (1, 32, 128)
    for length in (512, 8192, 32768)
    if count * length <= 1 << 20
} | {"63 x 512 and 1 x 65536": (512,) * 63 + (65536,)}
"""Number of keys of each sequence."""
STAGES, KEYS, FILLED = (3, 5), (64, 128), (2, 4)
"""Pipeline stages, keys per tile and splits per multiprocessor of `--tiles`."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A backend, and for `triton` the tile and splits of its decode, if they are not its own."""

    backend: str
    tile: tuple[int, int, int] | None = None
    """Stages, keys per tile, splits per multiprocessor."""

    @property
    def name(self) -> str:
        if self.tile is None:
            return self.backend
        stages, keys, filled = self.tile
        return f"{self.backend}, {stages} stages, {keys} keys, {filled} splits"

    def load(self, device: torch.device) -> AttentionBackend | None:
        if self.tile is None:
            return attention_backend(self.backend, device, BLOCK)
        from segue.kernels.attention.backends.triton import Tile, TritonAttention  # needs the package triton

        stages, keys, filled = self.tile
        return TritonAttention(device, Tile(queries=16, keys=keys, warps=4, stages=stages), filled)


def variants(bench: AttentionBench) -> list[Variant]:
    """The backends, and the tiles that are tried."""
    tiles = list(product(STAGES, KEYS, FILLED)) if bench.tiles else []
    return [*map(Variant, bench.backends), *(Variant("triton", tile) for tile in tiles)]


class Measured(msgspec.Struct, kw_only=True):
    backend: str
    level: str
    seconds: float | None = None
    gigabytes_per_second: float | None = None
    failure: str | None = None


def run(bench: AttentionBench) -> int:
    """Measure all levels, and write them. Returns the exit status."""
    rows = []
    for level, lengths in LEVELS.items():
        shorter = tuple(max(1, length // bench.shorter) for length in lengths)
        for variant in variants(bench):
            rows.append(measure(variant, level, shorter, bench.device, bench.dtype))
            one = rows[-1]
            rate = f"{one.gigabytes_per_second:.0f} GB/s" if one.gigabytes_per_second is not None else one.failure
            bench.say(f"{level:>24}  {variant.name:<10} {rate}")
    path = bench.out / "attention.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([msgspec.to_builtins(one) for one in rows], indent=1) + "\n")
    for level in LEVELS:
        measured = [one for one in rows if one.level == level and one.seconds is not None]
        if measured:
            print(f"{level:>24}  best: {min(measured, key=lambda one: one.seconds or 0.0).backend}")
    print(f"written: {path}")
    return 1 if any(one.failure for one in rows) else 0


def measure(variant: Variant, level: str, lengths: Sequence[int], device_name: str, dtype_name: str) -> Measured:
    """Measure one level; a failure is reported in place of the figure."""
    device, dtype = torch.device(device_name), dtype_of(dtype_name)
    try:
        backend = variant.load(device)
        spec = KVSpec(1, KV_HEADS, WIDTH, dtype)
        layout = spec.layout(max(lengths))
        parts, blocks = [], 0
        for length in lengths:
            own = -(-length // BLOCK)
            parts.append(Part(range(blocks, blocks + own), length - 1, length))
            blocks += own
        store = KVStore(layout, num_blocks=blocks, block_size=BLOCK, dtype=dtype, device=device, backend=backend)
        step = paged_step(store, parts)
        q, k, v = (
            torch.randn(heads, len(lengths), WIDTH, device=device).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        run = partial((backend or TORCH).attend, 0, q, k, v, step, AttentionOptions(WIDTH**-0.5))
        with torch.inference_mode():
            seconds = best(run, device)
    # any exception: the other levels are still measured
    except Exception as error:
        first = str(error).partition("\n")[0]
        return Measured(backend=variant.name, level=level, failure=f"{type(error).__name__}: {first}")
    read = 2 * sum(lengths) * KV_HEADS * WIDTH * dtype.itemsize
    return Measured(backend=variant.name, level=level, seconds=seconds, gigabytes_per_second=read / seconds / 1e9)
