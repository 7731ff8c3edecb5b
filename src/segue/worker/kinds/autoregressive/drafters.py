"""Make a drafter from `speculation` in a deployment: load its weights and compute its share of the stage's memory.

Optional reading: `load_drafter` is called once, at load, if the deployment asks for speculation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from segue.engines.autoregressive.contract import AutoregressiveContext, AutoregressiveModel, KVSpec, YieldsRows
from segue.engines.autoregressive.speculation.cache import keeping
from segue.engines.autoregressive.speculation.contract import ChainHead
from segue.engines.autoregressive.speculation.drafter import Drafter
from segue.engines.autoregressive.speculation.heads import ChainDrafter, HeadsDrafter
from segue.engines.autoregressive.speculation.model import ModelDrafter
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.graph.deployment.options import SpeculationPlan
from segue.graph.kinds.autoregressive import AUTOREGRESSIVE, AutoregressivePlan
from segue.messages.errors import ConfigError
from segue.models.registry import family_of, read_config

if TYPE_CHECKING:
    from segue.models.shared.decoder.speculators.eagle import Eagle


_DIVIDED = ("ngram", "draft")
"""Methods that do not use the target's modules, which are divided in a tensor parallel stage."""


@dataclass(slots=True)
class LoadedDrafter:
    """A drafter with loaded weights; its cache is made when the number of blocks is known."""

    make: Callable[[int], Drafter]
    """Number of KV blocks → the drafter."""
    weight_bytes: int = 0
    kv: KVSpec | None = None
    """Spec of its own cache, if it has one; it holds as many tokens as the target's."""

    eager: bool = False
    """Whether it hooks inner layers, whose hooks do not run when a captured graph is replayed."""

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of `block_size` tokens in its cache."""
        return block_size * keeping(self.kv).token_width * self.kv.dtype.itemsize if self.kv is not None else 0

    def speculation(self, plan: SpeculationPlan, num_blocks: int) -> Speculation:
        """Return the engine's `Speculation`."""
        return Speculation(self.make(num_blocks), plan.tokens, adaptive=plan.adaptive)


def load_drafter(
    stage: AutoregressivePlan, target: AutoregressiveModel, context: AutoregressiveContext
) -> LoadedDrafter | None:
    """Load the stage's drafter; None if it has none, or if drafting is ruled out: another stage drives it, or it yields
    rows of codes.

    Raises `ConfigError` naming the key under `stages.<name>.speculation`.
    """
    plan = stage.speculation
    if plan is None or target.conditioned or isinstance(target, YieldsRows):
        return None
    if stage.tensor_parallel > 1 and plan.method not in _DIVIDED:
        raise ConfigError(
            f"stage {stage.name!r}: speculation.method is {plan.method!r}, which uses the model's modules; if "
            f"tensor_parallel is {stage.tensor_parallel}, it must be one of {', '.join(_DIVIDED)}",
            field=f"stages.{stage.name}.speculation.method",
        )
    if target.kv.states is not None and plan.method != "ngram":
        raise ConfigError(
            f"stage {stage.name!r}: speculation.method is {plan.method!r}; for a model whose layers keep a state per "
            "sequence it must be ngram",
            field=f"stages.{stage.name}.speculation.method",
        )
    try:
        match plan.method:
            case "ngram":
                return LoadedDrafter(lambda num_blocks: NgramDrafter(plan.ngram_min, plan.ngram_max))
            case "draft":
                return _draft_model(stage, _directory(plan), target, context)
            case "medusa":
                return _medusa(_directory(plan), target, context)
            case "eagle":
                head = _eagle(_directory(plan), target, context)
                return replace(_chain(head, stage, target), eager=head.inner)
            case _:
                return _chain(_multi_token(target, context), stage, target)
    except ConfigError as error:
        field = f"stages.{stage.name}.{error.field}" if (error.field or "").startswith("speculation") else error.field
        raise ConfigError(f"stage {stage.name!r}: speculation: {error.message}", field=field) from error


def _directory(plan: SpeculationPlan) -> Path:
    directory = Path(plan.model or "")
    if not directory.is_dir():
        raise ConfigError(f"speculation.model is {plan.model!r}, which is not a directory", field="speculation.model")
    return directory


def _draft_model(
    stage: AutoregressivePlan, directory: Path, target: AutoregressiveModel, context: AutoregressiveContext
) -> LoadedDrafter:
    config = read_config(directory)
    family = family_of(config, directory)
    graph = family.graph(config)
    own_kind = AUTOREGRESSIVE.name
    name = next((name for name in graph.topological() if graph.stages[name].engine == own_kind), None)
    if name is None:
        raise ConfigError(f"{directory}: {graph.name!r} has no language model to draft with", field="speculation.model")
    # without the stage's own options, which belong to the target's family; undivided, on rank 0 of a divided target
    own = replace(context, model_dir=directory, stage=name, options={}, group=None, lora=None, quantization="none")
    draft = family.load_stages().STAGE_MODELS[name](own)
    if draft.kv.states is not None:
        raise ConfigError(
            f"speculation.model is {str(directory)!r}, whose layers keep a state per sequence; a draft model must keep "
            "keys and values",
            field="speculation.model",
        )
    _check_vocabularies(context.model_dir, directory, target, draft)

    def make(num_blocks: int) -> Drafter:
        return ModelDrafter(draft, target.vocab_size, num_blocks, stage.block_size, stage.max_tokens_per_step)

    return LoadedDrafter(make, draft.weight_bytes, draft.kv)


def _medusa(directory: Path, target: AutoregressiveModel, context: AutoregressiveContext) -> LoadedDrafter:
    from segue.models.shared.decoder.speculators.medusa import Medusa

    heads = Medusa(directory, target, context.dtype)
    return LoadedDrafter(lambda num_blocks: HeadsDrafter(heads), heads.weight_bytes)


def _eagle(directory: Path, target: AutoregressiveModel, context: AutoregressiveContext) -> Eagle:
    from segue.models.shared.decoder.speculators.eagle import Eagle

    return Eagle(directory, target, context.dtype)


def _multi_token(target: AutoregressiveModel, context: AutoregressiveContext) -> ChainHead:
    from segue.models.shared.decoder.speculators.mtp import MultiToken

    return MultiToken(context.model_dir, target, context.dtype)


def _chain(head: ChainHead, stage: AutoregressivePlan, target: AutoregressiveModel) -> LoadedDrafter:
    def make(num_blocks: int) -> Drafter:
        return ChainDrafter(head, num_blocks, stage.block_size, target.device, target.vocab_size)

    return LoadedDrafter(make, head.weight_bytes, head.kv)


def _check_vocabularies(
    model_dir: Path, directory: Path, target: AutoregressiveModel, draft: AutoregressiveModel
) -> None:
    """Check that ids mean the same tokens. If the tokenizers agree, sizes may differ by unused ids at the end."""
    ours, theirs = _tokens(model_dir), _tokens(directory)
    if ours is not None and theirs is not None:
        if ours != theirs:
            raise ConfigError(
                f"speculation.model is {str(directory)!r}, whose tokenizer has other tokens than the model's",
                field="speculation.model",
            )
    elif target.vocab_size != draft.vocab_size:
        raise ConfigError(
            f"speculation.model is {str(directory)!r}, which has {draft.vocab_size} tokens; the model has "
            f"{target.vocab_size}",
            field="speculation.model",
        )


def _tokens(directory: Path) -> Any:
    """Read the vocabulary of `tokenizer.json`, for comparison; None if there is no such file."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        written = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not a tokenizer: {error}", field="speculation.model") from error
    return written.model.vocab, {token.id: token.content for token in written.added_tokens}


class _Added(msgspec.Struct):
    id: int
    content: str


class _TokenizerModel(msgspec.Struct):
    vocab: Any = None


class _TokenizerFile(msgspec.Struct):
    """The parts of `tokenizer.json` that map ids to tokens."""

    model: _TokenizerModel
    added_tokens: list[_Added] = []
