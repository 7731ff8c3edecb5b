"""Where a stage runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage runs. Stages of one group differ in `memory_share` and `memory_bytes` only."""

    devices: tuple[str, ...]
    replicas: int
    threads: int
    memory_share: float
    memory_bytes: int
    ranks: int = 1
    """Processes of each replica; `memory_bytes` is for one of them."""
