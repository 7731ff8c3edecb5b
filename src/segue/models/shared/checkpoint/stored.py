"""Read from a checkpoint's headers how large the weights of each stage are. No torch here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph

_MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def stored_bytes(model_dir: Path, graph: StageGraph) -> dict[str, int]:
    """Return stage → bytes of its weights as published, without stages whose tensors the graph does not name. Empty if
    a file cannot be read: loading says why."""
    prefixes = {prefix: stage.name for stage in graph.stages.values() for prefix in stage.tensors}
    if not prefixes:
        return {}
    found: Counter[str] = Counter()
    try:
        for path in _files(model_dir):
            for name, nbytes in _tensors(path).items():
                fitting = [prefix for prefix in prefixes if name.startswith(prefix)]
                if fitting:
                    found[prefixes[max(fitting, key=len)]] += nbytes
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return dict(found)


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        names: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        return [model_dir / name for name in sorted(set(names.values()))]
    return [model_dir / "model.safetensors"]


def _tensors(path: Path) -> dict[str, int]:
    """Return tensor → bytes, from the header of a safetensors file: its length in 8 bytes, then JSON."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{path}: not a safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: end - start for name, (start, end) in spans.items()}
