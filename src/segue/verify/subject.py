"""Read the facts of the checkpoint to verify from its files."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.messages.errors import ConfigError
from segue.models.family import Family
from segue.models.registry import PIPELINE, family_of, read_config
from segue.models.shared.checkpoint.files import located, read_object

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""dtype → bytes per weight."""
_STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
"""dtype name of safetensors → bytes per number; 1 for all others."""
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_)?model(?:-\d+-of-\d+)?(?:\.(?P<variant>\w+))?(?:-\d+-of-\d+)?\.safetensors"
)
"""Names of files from which transformers and diffusers load weights."""
_INDICES = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json")


@dataclass(frozen=True)
class Subject:
    """A checkpoint, before anything is loaded."""

    model_dir: Path
    name: str
    config: dict[str, Any]
    family: Family
    graph: StageGraph
    dtype: str
    """The dtype of most of its weights."""
    floats: int
    """Number of weights stored as floating-point numbers of 16 or 32 bits."""
    other_bytes: int
    """Bytes of the weights stored otherwise (quantized, or masks), which the dtype does not change."""
    files: tuple[Path, ...]
    """The files from which the weights are loaded."""
    floats_by_part: Mapping[str, int]
    """First part of a weight's name, such as `thinker` → its part of `floats`."""

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights, loaded in a dtype."""
        return self.floats * BYTES[dtype] + self.other_bytes

    def stage_bytes(self, stage: str, dtype: str) -> int:
        """Return an upper bound: bytes of the weights whose names begin with the stage's, or of all if none do."""
        floats = self.floats_by_part.get(stage, self.floats)
        return floats * BYTES[dtype] + self.other_bytes

    def holds(self, path: Path) -> bool:
        """Return whether a path is in the checkpoint's directory, or is a file that a link there leads to."""
        if path.parent.resolve().is_relative_to(self.model_dir.resolve()):
            return True
        own = [file for file in self.model_dir.rglob("*") if file.is_file()] if path.exists() else []
        return any(path.samefile(file) for file in own)

    @property
    def context(self) -> int | None:
        """The context length in tokens that its config names, or the smallest that a part of it names; None if none is
        named."""
        own = self.config.get("max_position_embeddings")
        return own if isinstance(own, int) else min(_positions(self.config), default=None)


def read_subject(model: str | Path) -> Subject:
    """Read a checkpoint. Raises `ConfigError` if there is none, or if Segue does not serve it."""
    model_dir, name = located(model)
    config = read_config(model_dir)
    family = family_of(config, model_dir)
    files = tuple(_files(model_dir))
    if not files:
        raise ConfigError(f"{str(model_dir)!r} holds no safetensors files, so there are no weights", field="model")
    counts: Counter[str] = Counter()
    by_part: Counter[str] = Counter()
    for path in files:
        for tensor, kind, size in _weights(path):
            counts[kind] += size
            by_part[tensor.partition(".")[0]] += size if kind in _FLOATS else 0
    floats = {kind: counts[kind] for kind in _FLOATS if counts[kind]}
    dtype = _FLOATS[max(floats, key=lambda kind: floats[kind])] if floats else "bfloat16"
    other = sum(count * _STORED.get(kind, 1) for kind, count in counts.items() if kind not in _FLOATS)
    graph = family.graph(config)
    return Subject(model_dir, name, config, family, graph, dtype, sum(floats.values()), other, files, by_part)


def _files(model_dir: Path) -> list[Path]:
    """Return the files that the libraries load: for a pipeline, from the folders of the components in its index."""
    if not (model_dir / PIPELINE).is_file():
        return _of_folder(model_dir)
    components = read_object(model_dir / PIPELINE).items()
    named = [name for name, value in components if isinstance(value, list) and value and value[0] is not None]
    return [path for name in sorted(named) for path in _of_folder(model_dir / name)]


def _of_folder(folder: Path) -> list[Path]:
    """Return the shards of its index; else the file with the library's own name; else one variant's, e.g. fp16; else
    all, since some models have files that no library names."""
    for name in _INDICES:
        if (folder / name).is_file():
            shards = read_object(folder / name).get("weight_map")
            if not isinstance(shards, dict):
                raise ConfigError(f"{folder / name}: has no weight_map", field="model")
            return [folder / shard for shard in sorted(set(map(str, shards.values())))]
    variants: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if match := _WEIGHTS.fullmatch(path.name):
            variants.setdefault(match["variant"] or "", []).append(path)
    return variants[min(variants)] if variants else sorted(folder.glob("*.safetensors"))


def _weights(path: Path) -> list[tuple[str, str, int]]:
    """Return (name, dtype, numbers) of every tensor in a safetensors file, from its header. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        found = []
        for name, entry in header.items():
            if name != "__metadata__":
                size = 1
                for side in entry["shape"]:
                    size *= side
                found.append((name, str(entry["dtype"]), size))
        return found
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise ConfigError(f"{path}: not a safetensors file: {error}", field="model") from error


def _positions(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("max_position_embeddings", "n_positions", "max_seq_len") and isinstance(inner, int):
                yield inner
            else:
                yield from _positions(inner)
