"""Configuration that a deployment gives an autoregressive engine."""

from __future__ import annotations

from dataclasses import dataclass

from segue.graph.kinds.autoregressive import ATTENTIONS, KV_DTYPES, SCHEDULINGS
from segue.messages.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AutoregressiveConfig:
    """Sizes and modes of one engine. `memory.blocks_for` computes `num_blocks` if a byte budget is given."""

    num_blocks: int
    """KV blocks in all: `num_blocks * block_size` tokens can be held at once."""
    block_size: int = 16
    """Tokens per block; prefixes are shared in whole blocks."""
    max_batch: int = 16
    """Most requests in one step."""
    max_tokens_per_step: int = 2048
    """Most tokens in one step, over all requests; a longer prompt is prefilled in chunks."""
    prefill_chunk: int | None = None
    """Most prompt tokens in a step in which other requests decode; None: the rest of `max_tokens_per_step`."""
    prefix_caching: bool = True
    prefix_states: int | None = None
    """States of prefixes to keep, for a decoder with recurrent state; None: as many as `max_batch`."""
    deterministic: bool = False
    """Compute bit-identical logits for every batch composition (`invariant`)."""
    max_logprobs: int = 20
    """Most tokens per position whose log-probabilities a request may ask for; -1: any number."""
    scheduling: str = "fcfs"
    """The scheduling policy: `policies`."""
    attention: str = "auto"
    """The attention backend: `segue.kernels.attention.backends`."""
    enforce_eager: bool = False
    """Launch every kernel separately: no CUDA graphs."""

    hold_seconds: float = 60.0
    """How long a sequence keeps its blocks while it holds for more input."""
    kv_dtype: str = "auto"
    """Storage dtype of keys and values: `auto` (the dtype they are computed in) or `fp8`."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_batch", "max_tokens_per_step"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", field=name)
        if self.prefix_states is not None and self.prefix_states < 0:
            raise ConfigError(f"prefix_states is {self.prefix_states}; it must be at least 0", field="prefix_states")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk is {self.prefill_chunk}; it must be at least 1", field="prefill_chunk")
        if not self.hold_seconds > 0:
            raise ConfigError(f"hold_seconds is {self.hold_seconds}; it must be above 0", field="hold_seconds")
        if self.deterministic and self.attention not in ("auto", "torch"):
            raise ConfigError(
                f"attention is {self.attention!r}, but a deterministic stage has its own; leave it out",
                field="attention",
            )
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs is {self.max_logprobs}; it must be at least -1", field="max_logprobs")
        for name, allowed in (("scheduling", SCHEDULINGS), ("attention", ATTENTIONS), ("kv_dtype", KV_DTYPES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}", field=name)
