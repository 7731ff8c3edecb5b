"""Load one part of a diffusers pipeline: a folder of the checkpoint, of the class that `model_index.json` names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from segue.engines.contract import LoadContext
from segue.kernels.prepare import Plan, prepare
from segue.messages.errors import ConfigError, nearest
from segue.models.registry import PIPELINE
from segue.models.shared.checkpoint.checkpoint import Checkpoint, culprit, load_module
from segue.models.shared.checkpoint.pretrained import LOAD_FORMATS, without_bars
from segue.models.shared.diffusion.library import (
    LIBRARIES,
    VERSION,
    AutoConfig,
    AutoTokenizer,
    ModelMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from segue.models.shared.diffusion.sizes import config_of

ENCODED_ROWS = 64
"""Typical number of tokens of an encoder's call."""
_SHARD = r"(?:-\d+-of-\d+)?"
_WEIGHTS = re.compile(rf"(?:diffusion_pytorch_)?model{_SHARD}(?:\.(?P<variant>\w+))?{_SHARD}\.safetensors")
UNREADABLE = (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, SafetensorError)


def pipeline_index(model_dir: Path) -> dict[str, Any]:
    """Read `model_index.json`: parts as `name: [library, class]`, settings of the pipeline as plain values."""
    return config_of(model_dir, "", PIPELINE)


def pipeline_class(model_dir: Path) -> Any:
    """The pipeline's class. Raises `ConfigError` if diffusers does not have it."""
    kind = pipeline_index(model_dir).get("_class_name")
    if kind not in dir(LIBRARIES["diffusers"]):
        raise ConfigError(f"{model_dir / PIPELINE}: diffusers {VERSION} has no {kind!r}", field="model")
    return getattr(LIBRARIES["diffusers"], kind)


def component_config(model_dir: Path, name: str, file: str = "config.json") -> dict[str, Any]:
    """The config of a part, without building it."""
    return config_of(model_dir, name, file)


def component_class(model_dir: Path, name: str) -> Any:
    """The class of a part. Raises `ConfigError` if neither library has it: code in a checkpoint is never run."""
    named = pipeline_index(model_dir).get(name)
    if not isinstance(named, list) or len(named) != 2 or named[1] is None:
        raise ConfigError(f"{model_dir / PIPELINE} names no part {name!r}", field="model")
    library, kind = named
    module = LIBRARIES.get(library)
    found = getattr(module, kind, None) if module is not None else None
    if found is None:
        raise ConfigError(
            f"{model_dir / PIPELINE}: {name} is {library}.{kind}, which diffusers {VERSION} and transformers do not "
            "have",
            field="model",
        )
    return found


def load_component(ctx: LoadContext, name: str, *, dtype: torch.dtype | None = None) -> Any:
    """A network on `ctx.device` in `dtype` (default `ctx.dtype`), with the checkpoint's weights or random ones.

    Raises `ConfigError` with the folder's name.
    """
    _check_format(ctx)
    kind = component_class(ctx.model_dir, name)
    directory = ctx.model_dir / name
    network: nn.Module
    if ctx.load_format == "dummy":
        network = load_module(
            ctx, lambda: build(kind, directory), lambda tensor: [tensor], checkpoint=None, dtype=dtype or ctx.dtype
        )
        if isinstance(network, PreTrainedModel):
            network.tie_weights()
    else:
        network = _read(kind, directory, dtype or ctx.dtype, ctx.device)
    ctx.progress(1.0, name)
    return network.eval().requires_grad_(False)


def load_own(ctx: LoadContext, name: str, kind: Callable[..., nn.Module]) -> nn.Module:
    """Load a network that is in neither library: `kind`, built from `config.json` in the folder `name`, with the
    tensors of `model.safetensors` there (or of shards with an index) under the names of its `state_dict`, or random
    ones.

    Raises `ConfigError` with the file and tensor.
    """
    _check_format(ctx)
    config = component_config(ctx.model_dir, name)

    def built() -> nn.Module:
        try:
            return kind(**config)
        except TypeError as error:  # for a key that the class does not accept
            raise ConfigError(f"{ctx.model_dir / name / 'config.json'}: {error}", field="model") from error

    checkpoint = None if ctx.load_format == "dummy" else Checkpoint(ctx.model_dir / name)
    return load_module(ctx, built, lambda tensor: [tensor], checkpoint=checkpoint)


def load_encoder(ctx: LoadContext, name: str) -> Any:
    """As `load_component`; on a CPU the weights are laid out for the tokens of one or two prompts."""
    network = load_component(ctx, name)
    prepare(network, ctx.device, Plan(rows=ENCODED_ROWS))
    return network


def _check_format(ctx: LoadContext) -> None:
    if ctx.load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {ctx.load_format!r}{nearest(ctx.load_format, LOAD_FORMATS)}", field="load_format"
        )


def build(kind: Any, directory: Path) -> nn.Module:
    """Build a part from its config, without reading weights, on the default device."""
    if issubclass(kind, ModelMixin):
        return kind.from_config(kind.load_config(directory, local_files_only=True))
    return kind(AutoConfig.from_pretrained(directory, local_files_only=True))


def _read(kind: Any, directory: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    _check_there(directory)
    try:
        with without_bars():
            network, info = kind.from_pretrained(
                directory,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                dtype=dtype,
                variant=variant_of(directory),
            )
    except UNREADABLE as error:
        at = culprit(directory, error)
        raise ConfigError(f"{at}: the weights cannot be loaded: {error}", field="model") from error
    missing = sorted(info["missing_keys"])
    if missing:  # the library would continue with random ones
        raise ConfigError(
            f"{directory}: {len(missing)} tensors of the model are not in the checkpoint, the first is {missing[0]!r}",
            field="model",
        )
    _check_stored(network, directory)
    return network.to(device)


def variant_of(directory: Path) -> str | None:
    """The variant suffix of a folder's weights if there are none without: `fp16` for
    `diffusion_pytorch_model.fp16.safetensors`. None: no variant, or several."""
    found = [match["variant"] for path in directory.glob("*.safetensors") if (match := _WEIGHTS.fullmatch(path.name))]
    return found[0] if len(set(found)) == 1 else None


def _check_there(directory: Path) -> None:
    """Raise `ConfigError` if the folder is missing: the libraries would look for a repository of that name."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: not there; the part {directory.name!r} of the pipeline is missing", field="model"
        )


def _check_stored(network: nn.Module, directory: Path) -> None:
    """Raise `ConfigError` for integer tensors in the file whose parameters are floating-point: the libraries would load
    them as they are."""
    real = {name for name, weight in network.named_parameters() if weight.is_floating_point()}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                if name in real and (stored := file.get_slice(name).get_dtype()).startswith(("I", "U", "BOOL")):
                    raise ConfigError(
                        f"{path}: the weights cannot be loaded: {name!r} is stored as {stored}; it must be "
                        "floating-point",
                        field="model",
                    )


def load_tokenizer(model_dir: Path, name: str = "tokenizer") -> PreTrainedTokenizerBase:
    """Load a tokenizer. Raises `ConfigError` with the folder's name."""
    _check_there(model_dir / name)
    try:
        return AutoTokenizer.from_pretrained(model_dir / name, local_files_only=True)
    except UNREADABLE as error:
        raise ConfigError(f"{model_dir / name}: the tokenizer cannot be loaded: {error}", field="model") from error


def load_processor(model_dir: Path, name: str = "processor") -> Any:
    """Load a processor of texts and images (a `ProcessorMixin` of transformers). Raises `ConfigError`."""
    kind = component_class(model_dir, name)
    try:
        return kind.from_pretrained(model_dir / name, local_files_only=True)
    except UNREADABLE as error:
        raise ConfigError(f"{model_dir / name}: the processor cannot be loaded: {error}", field="model") from error
