"""What a deployment sets for an autoregressive engine."""

from __future__ import annotations

from dataclasses import dataclass

from segue.graph.deployment import ATTENTIONS, KV_DTYPES, SCHEDULINGS
from segue.messages.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AutoregressiveConfig:
    """Sizes of one engine. `num_blocks` comes from `memory.blocks_for` where a byte budget is given."""

    num_blocks: int
    """KV blocks in all: `num_blocks * block_size` tokens can be held at once."""
    block_size: int = 16
    """Tokens per block; a prefix is shared in whole blocks."""
    max_batch: int = 16
    """Most requests in one step."""
    max_tokens_per_step: int = 2048
    """Most tokens in one step, over all requests; a longer prompt is prefilled in chunks."""
    prefill_chunk: int | None = None
    """Most prompt tokens in a step in which other requests decode; None: what `max_tokens_per_step` leaves."""
    prefix_caching: bool = True
    prefix_states: int | None = None
    """States of prefixes that are kept, of a decoder that keeps states; None: as many as `max_batch`."""
    deterministic: bool = False
    """The same logits to the bit whatever the batch (`invariant`)."""
    max_logprobs: int = 20
    """Most tokens whose log-probabilities a request may ask for in one place; -1: any number."""
    scheduling: str = "priority"
    """Who runs first: `policies`."""
    attention: str = "auto"
    """What computes attention: `segue.kernels.backends`."""
    enforce_eager: bool = False
    """Launch every kernel by itself: no CUDA graphs."""

    kv_dtype: str = "auto"
    """What keys and values are stored in: `auto` (as they are computed) or `fp8`."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_batch", "max_tokens_per_step"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", field=name)
        if self.prefix_states is not None and self.prefix_states < 0:
            raise ConfigError(f"prefix_states is {self.prefix_states}; it must be at least 0", field="prefix_states")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk is {self.prefill_chunk}; it must be at least 1", field="prefill_chunk")
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
