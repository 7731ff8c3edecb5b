"""The diffusion kind: denoisers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from segue.graph.deployment.options import lora_of, quantization_of
from segue.graph.deployment.section import Section, wrong
from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.kinds.kind import ORDERS, EngineKind, extended
from segue.graph.parts import Stage
from segue.messages.errors import ConfigError

ATTENTIONS = ("auto", "native", "cudnn", "flash", "flash_3", "sage", "xformers")
"""Attention backends of a denoiser, by diffusers' dispatch; all but `native` need a GPU and their package."""
OFFLOADS = ("none", "layerwise")
"""Where the weights of a denoiser's layers stay until they run: on its device, or in host memory."""
SEQUENCE_MODES = ("ulysses", "ring")
"""What the ranks of a sequence parallel denoiser exchange in attention: tokens for heads, or keys and values. Either
mode may be given a number of ranks."""
_RANK_KEYS = ("tensor_parallel", "cfg_parallel", "sequence_parallel")


@dataclass(frozen=True, slots=True)
class DiffusionPlan(StagePlan):
    """A stage of the diffusion engine."""

    attention: str = "auto"
    """One of `ATTENTIONS`."""
    enforce_eager: bool = False
    compile: bool = False
    tensor_parallel: int = 1
    """Processes of each replica that have a part of the weights each."""
    cfg_parallel: int = 1
    """Processes of each replica that divide the guidance branches."""
    sequence_parallel: int = 1
    """Processes of each replica that divide the tokens of each row."""
    sequence_ring: int = 1
    """How many of these processes exchange keys and values in a ring; the others exchange tokens for heads."""
    quantization: str = "none"
    gguf: dict[str, str] = field(default_factory=dict)
    """Network → the GGUF file with its weights."""
    offload: str = "none"
    """One of `OFFLOADS`."""

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.cfg_parallel * self.sequence_parallel


def _resolve(stage: StagePlan, section: Section, choices: Mapping[str, str]) -> DiffusionPlan:
    ways = _ways(section)
    return extended(
        DiffusionPlan,
        stage,
        attention=choices["attention"],
        enforce_eager=section.flag("enforce_eager", False),
        compile=section.flag("compile", False),
        **ways,
        sequence_ring=_ring(section, ways.get("sequence_parallel", 1)),
        quantization=quantization_of(section, stage.devices),
        gguf=_gguf(section),
        offload=section.choice("offload", "none", OFFLOADS),
        lora=lora_of(section),
    )


def _ways(section: Section) -> dict[str, int]:
    """Return key → number of processes; the numbers multiply. `tensor_parallel` under `defaults` is for language models
    only."""
    keys = [key for key in _RANK_KEYS if key != "tensor_parallel" or key in section.values]
    said = {key: section.integer(key, None) for key in keys}
    return {key: ranks for key, ranks in said.items() if ranks is not None and ranks > 1}


def _ranks(graph: str, stage: Stage, section: Section) -> int | None:
    ways = _ways(section)
    return math.prod(ways.values()) if ways else None


def _ring(section: Section, ranks: int) -> int:
    """Return how many of the sequence parallel ranks form a ring. `sequence_mode` is one mode for all ranks, or gives
    each mode a number of ranks; the product is `ranks`."""
    path, mode = section.find("sequence_mode")
    if "sequence_mode" in section.values and ranks == 1:
        raise ConfigError(f"{path} is set, but sequence_parallel is 1; set it, or leave sequence_mode out", field=path)
    if not isinstance(mode, Mapping):
        return ranks if section.choice("sequence_mode", SEQUENCE_MODES[0], SEQUENCE_MODES) == "ring" else 1
    both = Section(path, mode, SEQUENCE_MODES)
    ulysses, ring = (both.integer(key, 1) for key in SEQUENCE_MODES)
    if ranks > 1 and ulysses * ring != ranks:
        raise ConfigError(
            f"{path} is ulysses {ulysses} x ring {ring}, which is {ulysses * ring}, but sequence_parallel is {ranks}; "
            f"the product must equal it",
            field=path,
        )
    return ring if ranks > 1 else 1


def _gguf(section: Section) -> dict[str, str]:
    """Return network → GGUF file. A single file is for `transformer`, which every transformer pipeline has."""
    path, value = section.find("gguf")
    if value is None:
        return {}
    files = {"transformer": value} if isinstance(value, str) else value
    named = isinstance(files, Mapping) and all(isinstance(name, str) for name in files)
    if not named or not all(isinstance(file, str) and file for file in files.values()):
        raise wrong(path, value, "a GGUF file, or such files by network (transformer, transformer_2, unet)")
    return {name: os.path.abspath(os.path.expanduser(file)) for name, file in files.items()}


def _check_defaults(section: Section) -> None:
    _ring(section, 1)


DIFFUSION = EngineKind(
    name="diffusion",
    plan=DiffusionPlan,
    resolve=_resolve,
    worker="segue.worker.kinds.diffusion",
    keys=(
        "scheduling",
        "attention",
        "enforce_eager",
        "compile",
        "quantization",
        "gguf",
        "offload",
        "sequence_mode",
        *_RANK_KEYS,
        "lora",
    ),
    choices={"scheduling": ORDERS, "attention": ATTENTIONS},
    rank_keys=_RANK_KEYS,
    ranks=_ranks,
    check_defaults=_check_defaults,
    dominant=True,
)
