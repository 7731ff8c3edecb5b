"""Load a whole model of transformers by the library's own loader, for the generic families.

They use `from_pretrained` instead of `segue.models.shared.checkpoint.checkpoint`: the whole model is in one stage, so
the drawbacks named there do not apply, and it handles differences between models: names of older versions, experts
stored one by one and fused in the module, tied weights, quantised formats.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError, nearest
from segue.models.shared.checkpoint.checkpoint import Checkpoint, check_index, culprit, load_module
from segue.models.shared.checkpoint.files import GENERATION, check_objects
from segue.models.shared.checkpoint.packed.formats import format_of, without_it, written_in
from segue.models.shared.checkpoint.packed.reader import Format, PackedWeights
from segue.models.shared.library import (
    QUANTIZERS,
    VERSION,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)
from segue.parallel.group import Group
from segue.parallel.shard import shard

LOAD_FORMATS = ("auto", "dummy")
_TABLE = "embedding_rowwise"
"""Entry of a tensor parallel plan that divides the embedding."""
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError)


def load_config(ctx: LoadContext) -> PreTrainedConfig:
    """The checkpoint's config. Raises `ConfigError` with the file's name, or for an unknown `load_format`."""
    if ctx.load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {ctx.load_format!r}{nearest(ctx.load_format, LOAD_FORMATS)}", field="load_format"
        )
    path = ctx.model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not there, so {str(ctx.model_dir)!r} is not a checkpoint", field="model")
    try:
        return AutoConfig.from_pretrained(ctx.model_dir)
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: {error}", field="model") from error


def load_model(
    ctx: LoadContext,
    config: PreTrainedConfig,
    auto: Any = AutoModelForCausalLM,
    *,
    unused: tuple[str, ...] = (),
    whole_table: bool = False,
    emptied: bool = False,
    plan: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """The model on `ctx.device` in `ctx.dtype`, with the checkpoint's weights or random ones (`load_format`).

    `auto`: the library's class that selects the model class of a config, or the model class itself. `unused`: prefixes
    of names of tensors that the checkpoint may lack, because they are not used. `whole_table`: every rank keeps the
    whole embedding, and may read it without the others. `emptied`: tensors that are empty by the config may have
    elements in the checkpoint. `plan`: the tensor parallel plan of a model for which the library has none. Raises
    `ConfigError`.
    """
    if not _one_class(auto) and type(config) not in auto._model_mapping:
        raise ConfigError(
            f"transformers {VERSION} has no such model of type {config.model_type!r} ({auto.__name__})",
            field="architectures",
        )
    format = _format(ctx, config)
    if format is not None:
        config = without_it(config)
    if ctx.load_format == "dummy":
        model = _random(ctx, config, auto, _cutter(ctx, whole_table, plan))
    else:
        packed = None if format is None else PackedWeights(format, Checkpoint(ctx.model_dir))
        model = _read(ctx, config, auto, unused, emptied, packed, _cutter(ctx, whole_table, plan))
    return model.eval().requires_grad_(False)


def load_part(
    ctx: LoadContext,
    whole: PreTrainedConfig,
    config: PreTrainedConfig,
    kind: type[PreTrainedModel],
    prefix: str,
    *,
    plan: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """Load one language model of a checkpoint with several: `kind`, by `config`, whose tensors have names that begin
    with `prefix`. `whole`: the checkpoint's config; `plan`: as in `load_model`. Every rank keeps the whole embedding.

    Tensors of the other parts are not read. Raises `ConfigError`.
    """
    config = deepcopy(config)
    if ctx.load_format != "dummy" and (written := written_in(whole)) and _packs(written, ctx, prefix):
        config.quantization_config = written
    with errors_only("transformers"):  # it reports all tensors of the other parts
        return load_model(ctx, config, kind, whole_table=True, emptied=True, plan=plan)


def _packs(written: dict[str, Any], ctx: LoadContext, prefix: str) -> bool:
    """Whether a format of packed weights concerns the tensors of a part; unknown for formats that the library reads."""
    format = format_of(written, ctx.model_dir / "config.json")
    if format is None:
        return True
    return any(name.startswith(prefix) for name in PackedWeights(format, Checkpoint(ctx.model_dir)).layers)


def _one_class(auto: Any) -> bool:
    return isinstance(auto, type) and issubclass(auto, PreTrainedModel)


Cutter = Callable[[PreTrainedModel], None]
"""Keeps only this rank's part of a model."""


def _cutter(ctx: LoadContext, whole_table: bool, plan: Mapping[str, str] | None) -> Cutter | None:
    group = _group(ctx)
    return None if group is None else partial(_cut, group, whole_table, plan)


def _group(ctx: LoadContext) -> Group | None:
    """The ranks that share the weights; None: this process has them all."""
    return ctx.group if isinstance(ctx, AutoregressiveContext) else None


def _random(ctx: LoadContext, config: PreTrainedConfig, auto: Any, cut: Cutter | None) -> PreTrainedModel:
    """Random weights. Parameters of equal shape get equal values on every rank, so undivided ones agree on all
    ranks."""

    def build() -> PreTrainedModel:
        made: PreTrainedModel = (auto._from_config if _one_class(auto) else auto.from_config)(config, dtype=ctx.dtype)
        return made

    if cut is None:
        model = load_module(ctx, build, lambda name: [name], checkpoint=None)
        model.tie_weights()
        return model
    return load_module(ctx, build, lambda name: [name], checkpoint=None, prepare=cut)


def _cut(group: Group, whole_table: bool, plan: Mapping[str, str] | None, model: PreTrainedModel) -> None:
    """Keep only this rank's part of the model."""
    plan = plan or model.tp_plan or {}
    plan = {name: style for name, style in plan.items() if not (whole_table and style == _TABLE)}
    shard(model, plan, model.config.get_text_config(decoder=True), group)


def _format(ctx: LoadContext, config: PreTrainedConfig) -> Format | None:
    """The format of packed weights, None for plain weights and for formats that the library reads. Raises
    `ConfigError`."""
    written = written_in(config)
    if not written:
        return None
    method = written.get("quant_method")
    if isinstance(ctx, AutoregressiveContext) and ctx.quantization != "none":
        raise ConfigError(
            f"quantization is {ctx.quantization!r}, but the weights of {ctx.model_dir} are quantised already "
            f"({method}); leave it out",
            field="quantization",
        )
    format = format_of(written, ctx.model_dir / "config.json")
    if format is not None:
        if (group := _group(ctx)) is not None:
            raise ConfigError(
                f"tensor_parallel is {group.size}, but the weights of {ctx.model_dir} are packed ({method}), "
                "which cannot be divided; leave it out",
                field="tensor_parallel",
            )
        return format
    known = {*QUANTIZERS, "bitsandbytes"}
    if method not in known:  # the library would load such weights as if they were plain
        raise ConfigError(
            f"{ctx.model_dir}: its weights are quantised by {method!r}, which transformers {VERSION} does not know"
            f"{nearest(str(method), known)}",
            field="quantization_config",
        )
    return None


def _read(
    ctx: LoadContext,
    config: PreTrainedConfig,
    auto: Any,
    unused: tuple[str, ...],
    emptied: bool,
    packed: PackedWeights | None,
    cut: Cutter | None,
) -> PreTrainedModel:
    # divided weights are read on the CPU: parts that a rank does not keep stay in the file's pages
    here = ctx.device.type == "cpu" or cut is not None
    where: dict[str, Any] = {} if here else {"device_map": {"": ctx.device}}
    if packed is not None:
        where["quantization_config"] = packed
    try:
        with without_bars():
            model, info = auto.from_pretrained(
                ctx.model_dir,
                config=config,
                dtype=ctx.dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=emptied,
                **where,
            )
    except ConfigError:
        raise
    # the checkpoint is the cause of any library error: files in another format, sizes that make no network (a
    # division by zero, an assertion), a quantised format whose package is missing
    except Exception as error:
        if packed is not None and packed.error is not None:
            raise packed.error from error
        check_objects(ctx.model_dir, (GENERATION,))
        check_index(ctx.model_dir)
        at = culprit(ctx.model_dir, error)
        pickled = not any(ctx.model_dir.glob("*.safetensors")) and any(ctx.model_dir.glob("*.bin"))
        right = "; those in .bin files are not read: save them as safetensors (save_pretrained does)" if pickled else ""
        raise ConfigError(f"{at}: the weights cannot be loaded: {error}{right}", field="model") from error
    for name, written, wanted in sorted(info["mismatched_keys"], key=str):
        if wanted.numel():
            raise ConfigError(
                f"{ctx.model_dir}: {name!r} has the shape {tuple(written)}; by the config it must be {tuple(wanted)}",
                field="model",
            )
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(unused))
    if missing:  # the library would continue with random ones
        raise ConfigError(
            f"{ctx.model_dir}: {len(missing)} tensors of the model are not in the checkpoint, the first is "
            f"{missing[0]!r}{_of_strays(packed)}",
            field="model",
        )
    if cut is not None:
        cut(model)
        model = model.to(ctx.device)
    ctx.progress(1.0, "weights")
    return model


def _of_strays(packed: PackedWeights | None) -> str:
    """An addition to the error for missing tensors."""
    if packed is None or not packed.strays:
        return ""
    return f"; {len(packed.strays)} packed layers match no layer of the model, the first is {packed.strays[0]!r}"


@contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Suppress one logger's warnings."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def without_bars() -> Iterator[None]:
    """Suppress the library's progress bars: a worker reports progress by messages."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()
