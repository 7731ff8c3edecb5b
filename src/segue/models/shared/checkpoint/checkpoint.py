"""Read a checkpoint tensor by tensor, so that each worker reads only its own part.

`from_pretrained` could load a part of a model too, but it reports every tensor of the other parts as unexpected, cannot
read single rows, and names no file when a tensor is missing or has the wrong shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.files import read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Dtypes by safetensors' names."""

Located = Callable[[str], Sequence[str]]
"""Name of a tensor in a module → its possible names in the checkpoint, most likely first."""

M = TypeVar("M", bound=torch.nn.Module)


class _Index(msgspec.Struct):
    """The index file of a sharded checkpoint."""

    weight_map: dict[str, str]
    """Tensor name → file name."""


class Checkpoint:
    """The safetensors files of a model directory: one, or shards with an index. Files are opened on first use."""

    def __init__(self, directory: Path, single: str = SINGLE) -> None:
        """`single`: the name of the file if there is only one. Raises `ConfigError` with the file that is missing or
        unreadable."""
        self.directory = directory
        self._files = _index(directory, single)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """One tensor as stored, or only these rows of it: [len(rows), …]; no other rows are read."""
        path = self.path_of(name)
        try:
            with safe_open(path, framework="pt") as file:
                if rows is None:
                    return file.get_tensor(name)
                view = file.get_slice(name)
                count = view.get_shape()[0]
                for row in rows:
                    if not 0 <= row < count:
                        raise ConfigError(f"{path}: tensor {name!r} has {count} rows; row {row} is asked for")
                return torch.cat([view[row : row + 1] for row in rows])
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot read tensor {name!r}: {error}") from error

    def shapes(self) -> dict[str, torch.Tensor]:
        """All tensors by name, on the meta device: shapes and dtypes from the headers. Raises `ConfigError`."""
        found: dict[str, torch.Tensor] = {}
        for path in sorted({self.path_of(name) for name in self._files}):
            try:
                with safe_open(path, framework="pt") as file:
                    names = list(file.keys())
                    found.update({name: _shape(file.get_slice(name), name) for name in names})
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from error
        return found

    def find(self, candidates: Sequence[str]) -> str:
        """The first of these names that exists."""
        for name in candidates:
            if name in self._files:
                return name
        raise ConfigError(f"{self.directory}: no tensor {candidates[0]!r} in the checkpoint")

    def fill(
        self,
        module: torch.nn.Module,
        located: Located,
        *,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[float, str], None] = lambda fraction, what: None,
    ) -> None:
        """Set the parameters of a module built on the meta device. Errors for wrong shapes name file and tensor."""
        wanted = module.state_dict()
        state: dict[str, torch.Tensor] = {}
        for done, (name, empty) in enumerate(wanted.items()):
            source = self.find(located(name))
            tensor = self.read(source)
            if tensor.shape != empty.shape:
                raise ConfigError(
                    f"{self.path_of(source)}: tensor {source!r} is {list(tensor.shape)}; "
                    f"the config asks for {list(empty.shape)}"
                )
            state[name] = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
            progress((done + 1) / len(wanted), source)
        module.load_state_dict(state, assign=True)

    def path_of(self, name: str) -> Path:
        """The file that contains a tensor. Raises `ConfigError`."""
        if name not in self._files:
            raise ConfigError(f"{self.directory}: no tensor {name!r} in the checkpoint")
        return self.directory / self._files[name]


def _shape(view: Any, name: str) -> torch.Tensor:
    """A tensor on the meta device with the shape and dtype of one in a file."""
    written = view.get_dtype()
    if written not in _DTYPES:
        raise ConfigError(f"tensor {name!r} is of the dtype {written}; supported are {', '.join(_DTYPES)}")
    return torch.empty(view.get_shape(), dtype=_DTYPES[written], device="meta")


def _index(directory: Path, single: str = SINGLE) -> dict[str, str]:
    """Tensor name → file name."""
    path = directory / INDEX
    if single == SINGLE and path.is_file():
        try:
            files = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: not an index of safetensors shards: {error}") from error
        for name in sorted(set(files.values())):
            if not (directory / name).is_file():
                raise ConfigError(f"{path} names {name!r}, which is not there")
        return files
    path = directory / single
    if not path.is_file():
        missing = f"neither {INDEX} nor {single}" if single == SINGLE else f"no {single}"
        raise ConfigError(f"{directory}: it has {missing}, so there are no weights to load")
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def check_index(directory: Path) -> None:
    """Raise `ConfigError` if the shard index is invalid or not in the library's format. Used to explain a failed load
    by the library."""
    path = directory / INDEX
    if not path.is_file():
        return
    if not _index(directory):
        raise ConfigError(f"{path}: names no tensors", field="model")
    if not isinstance(read_object(path).get("metadata"), dict):
        raise ConfigError(f"{path}: has no object 'metadata', which the library requires", field="model")


def culprit(directory: Path, error: Exception) -> Path:
    """The file that the library could not load. Errors of safetensors name no file, so this is the first that cannot be
    opened."""
    if isinstance(error, SafetensorError):
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt"):
                    continue
            except (OSError, SafetensorError):
                return path
    return directory


def fill_random(module: torch.nn.Module, *, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Fill a module built on the meta device with random parameters, created on `device`.

    Matrices preserve the variance of their input (normal, std fan_in**-0.5), gains are 1, biases 0, so that outputs are
    finite at any depth. On the meta device only shapes are set.
    """
    generator = None if device.type == "meta" else torch.Generator(device=device).manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, empty in module.state_dict().items():
        if empty.ndim >= 2:
            tensor = torch.empty(empty.shape, device=device, dtype=dtype)
            state[name] = tensor.normal_(std=1 / math.sqrt(math.prod(empty.shape[1:])), generator=generator)
        else:
            value = 1.0 if name.endswith("weight") else 0.0
            state[name] = torch.full(empty.shape, value, device=device, dtype=dtype)
    module.load_state_dict(state, assign=True)


def load_module(
    ctx: LoadContext,
    build: Callable[[], M],
    located: Located,
    *,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    prepare: Callable[[M], None] = lambda module: None,
) -> M:
    """Build a part of a model and load its weights: the checkpoint's, or random ones if `checkpoint` is None.

    `prepare` may change the module before it has weights. Buffers (rotary frequencies, filters) are computed by the
    module itself and keep their own dtype.
    """
    with init_empty_weights(include_buffers=False):
        module = build()
    prepare(module)
    dtype = dtype or ctx.dtype
    if checkpoint is None:
        fill_random(module, device=ctx.device, dtype=dtype, seed=seed)
    else:
        checkpoint.fill(module, located, device=ctx.device, dtype=dtype, progress=ctx.progress)
    return module.to(ctx.device).eval().requires_grad_(False)


def held_bytes(module: nn.Module) -> int:
    """Memory of a module's parameters and buffers, in bytes."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
