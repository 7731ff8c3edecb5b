"""The rows of a thinker's sequence as its talker takes them: one per token of the prompt, then of the reply."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from segue.engines.contract import Payload
from segue.models.shared.speech.rows import new_rows


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
