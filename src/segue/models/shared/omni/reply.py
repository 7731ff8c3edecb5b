"""What a talker takes of its thinker: the rows of its sequence, one per token of the prompt, then of the reply, and
rows of its embedding."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from segue.engines.contract import LoadContext, Payload
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.checkpoint import Checkpoint
from segue.models.shared.library import PreTrainedConfig
from segue.models.shared.speech.rows import new_rows

_EMBEDDING = ("thinker.model.embed_tokens.weight", "thinker.model.language_model.embed_tokens.weight")
"""As published, and as newer versions of the library nest it."""


@dataclass(slots=True)
class ThinkerRows:
    """The rows of one request that have arrived."""

    request_id: str
    taken: int = 0
    """Rows taken so far; repeated earlier rows (the thinker restarted) are dropped."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """Rows kept until the prompt can be built."""

    def take(self, payload: Payload, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
        """The rows of a chunk that were not taken before, [k, width]; None if there are none. Raises `StageFailed`."""
        rows = payload.get("rows")
        if rows is None:
            return None
        new = new_rows(rows, payload["rows_start"], self.taken, self.request_id)
        if not len(new):
            return None
        self.taken += len(new)
        return new.to(device=device, dtype=dtype)

    def spoken(self, rows: torch.Tensor, prompt: int, reply: int) -> torch.Tensor:
        """The last `rows` taken, without those after the reply's last token but one. `prompt`, `reply`: tokens."""
        surplus = max(self.taken - (prompt + max(reply - 1, 0)), 0)
        self.taken -= surplus
        return rows[: max(len(rows) - surplus, 0)]

    def beginning(self, rows: torch.Tensor | None, needed: int | None) -> torch.Tensor | None:
        """Keep `rows`. Once `needed` have been taken: all of them, [taken, width], which are no longer kept. `needed`:
        None if it is not known yet."""
        if rows is not None:
            self.kept.append(rows)
        if needed is None or self.taken < needed:
            return None
        whole = torch.cat(self.kept)
        self.kept.clear()
        return whole


def load_text_rows(ctx: LoadContext, config: PreTrainedConfig, ids: Sequence[int]) -> torch.Tensor:
    """Rows of the thinker's embedding, [len(ids), hidden] of `ctx.dtype` on `ctx.device`; reads only these rows.
    Raises `ConfigError`."""
    text = config.thinker_config.text_config
    for token in ids:
        if not 0 <= token < text.vocab_size:
            raise ConfigError(
                f"{ctx.model_dir}: text token {token} is named by the talker's config or its voices, but the thinker "
                f"has {text.vocab_size} tokens",
                field="model",
            )
    if ctx.load_format == "dummy":
        generator = torch.Generator().manual_seed(zlib.crc32(b"rows"))
        rows = torch.randn(len(ids), text.hidden_size, generator=generator) * text.hidden_size**-0.5
    else:
        checkpoint = Checkpoint(ctx.model_dir)
        rows = checkpoint.read(checkpoint.find(_EMBEDDING), rows=ids)
        if rows.shape[1] != text.hidden_size:
            raise ConfigError(
                f"{ctx.model_dir}: tensor {_EMBEDDING[0]!r} has rows of {rows.shape[1]}; the config asks for "
                f"{text.hidden_size}",
                field="model",
            )
    return rows.to(device=ctx.device, dtype=ctx.dtype)
