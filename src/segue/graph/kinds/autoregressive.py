"""The autoregressive kind: stages that sample tokens over a paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from segue.graph.deployment.options import (
    SpeculationPlan,
    lora_of,
    quantization_of,
    sampling_of,
    speculation_of,
)
from segue.graph.deployment.section import Section
from segue.graph.deployment.stage_plan import CPU, StagePlan
from segue.graph.kinds.kind import EngineKind, extended
from segue.graph.parts import Stage
from segue.messages.errors import ConfigError

ATTENTIONS = ("auto", "torch", "cpu", "triton", "flex", "flashinfer", "flash_attn")
SCHEDULINGS = ("fcfs", "priority", "fair")
"""Order of requests."""
KV_DTYPES = ("auto", "fp8")
"""Dtypes in which keys and values are stored; `auto`: the dtype in which they are computed."""

_TOKENS_PER_STEP = {"cpu": 512, "cuda": 2048}
"""Default tokens per step: enough to be compute-bound, few enough not to delay requests that are decoding."""
_PREFILL_CHUNK = {"cpu": 256, "cuda": None}
"""Default prompt tokens in a step in which other requests decode: from about 256 rows on, a CPU's GEMMs are near their
peak, so smaller steps cost little; a GPU finishes the whole step in a few tens of milliseconds."""


@dataclass(frozen=True, slots=True)
class AutoregressivePlan(StagePlan):
    """A stage of the autoregressive engine."""

    max_tokens_per_step: int = 2048
    prefill_chunk: int | None = None
    """None: all that is left of `max_tokens_per_step`."""
    max_model_len: int | None = None
    block_size: int = 16
    kv_blocks: int | None = None
    """None: as many as `memory_bytes` holds."""
    prefix_caching: bool = True
    prefix_states: int | None = None
    """For a model with recurrent states: number of prefix states to keep; None: `max_batch`, or as many as fit."""
    deterministic: bool = False
    """Compute bitwise equal logits in any batch."""
    max_logprobs: int = 20
    """Most log-probabilities that a request may ask for per position; -1: any number."""
    attention: str = "auto"
    """One of `ATTENTIONS`."""
    enforce_eager: bool = False
    compile: bool = False
    tensor_parallel: int = 1
    """Processes of each replica; each has a part of the weights."""
    speculation: SpeculationPlan | None = None
    quantization: str = "none"
    kv_dtype: str = "auto"
    """One of `KV_DTYPES`."""
    hold_seconds: float = 60.0
    """How long a request keeps its KV blocks while it waits for more input."""

    @property
    def ranks(self) -> int:
        return self.tensor_parallel

    @property
    def asked_of_family(self) -> tuple[str, ...]:
        asked = {"lora": self.lora is not None, "quantization": self.quantization != "none"}
        return tuple(key for key, wanted in asked.items() if wanted)


def _resolve(stage: StagePlan, section: Section, choices: Mapping[str, str]) -> AutoregressivePlan:
    device = CPU if CPU in stage.devices else "cuda"
    return extended(
        AutoregressivePlan,
        stage,
        **_settings(section, device),
        attention=choices["attention"],
        tensor_parallel=section.integer("tensor_parallel", 1),
        speculation=speculation_of(section),
        quantization=quantization_of(section, stage.devices),
        kv_dtype=section.choice("kv_dtype", "auto", KV_DTYPES),
        lora=lora_of(section),
        sampling=sampling_of(section),
    )


def _settings(section: Section, device: str) -> dict[str, Any]:
    """Return the numbers and flags of a stage."""
    return {
        "max_tokens_per_step": section.integer("max_tokens_per_step", _TOKENS_PER_STEP[device]),
        "prefill_chunk": section.integer("prefill_chunk", _PREFILL_CHUNK[device]),
        "max_model_len": section.integer("max_model_len", None),
        "block_size": section.integer("block_size", 16),
        "kv_blocks": section.integer("kv_blocks", None),
        "prefix_caching": section.flag("prefix_caching", True),
        "prefix_states": section.integer("prefix_states", None, least=0),
        "deterministic": section.flag("deterministic", False),
        "max_logprobs": section.integer("max_logprobs", 20, least=-1),
        "enforce_eager": section.flag("enforce_eager", False),
        "compile": section.flag("compile", False),
        "hold_seconds": section.number("hold_seconds", 60.0),
    }


def _check_defaults(section: Section) -> None:
    _settings(section, CPU)
    section.integer("tensor_parallel", 1)


def _ranks(graph: str, stage: Stage, section: Section) -> int | None:
    ranks = section.integer("tensor_parallel", None)
    if ranks in (None, 1):
        return None
    if not stage.divisible:
        path, _ = section.find("tensor_parallel")
        raise ConfigError(
            f"{path} is {ranks}, but the weights of stage {stage.name!r} of {graph!r} cannot be divided; it must be 1",
            field=path,
        )
    return ranks


AUTOREGRESSIVE = EngineKind(
    name="autoregressive",
    plan=AutoregressivePlan,
    resolve=_resolve,
    worker="segue.worker.kinds.autoregressive.kind",
    keys=(
        "max_tokens_per_step",
        "prefill_chunk",
        "max_model_len",
        "block_size",
        "kv_blocks",
        "prefix_caching",
        "prefix_states",
        "max_logprobs",
        "scheduling",
        "attention",
        "tensor_parallel",
        "enforce_eager",
        "compile",
        "deterministic",
        "speculation",
        "quantization",
        "kv_dtype",
        "hold_seconds",
        "sampling",
        "lora",
    ),
    choices={"scheduling": SCHEDULINGS, "attention": ATTENTIONS},
    max_batch=64,
    rank_keys=("tensor_parallel",),
    ranks=_ranks,
    check_defaults=_check_defaults,
    samples=True,
    holds=True,
    shares_weights=True,
    cache_share=0.8,
)
