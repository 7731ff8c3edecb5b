"""The heads of the language model: draw a row of codes, one per codebook, under the delay pattern.

Codebook k lags k rows behind codebook 0. As in `generate` of the library: the first row, and codebook k of the next k
rows, are the beginning of the stream; once a row has the end of the stream in any codebook, the rows after it have it
in one codebook more each, from the first on, and the utterance ends with the row that has it in all.

n sequences, H width, K codebooks, V codes of each with the two of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from segue.engines.autoregressive.contract import Draws
from segue.messages.errors import ConfigError
from segue.models.shared.library import GenerationConfig
from segue.models.speech.higgs_audio_v2.library import HiggsAudioV2Config

_UNFILTERED = (1.0, 0.0, 1.0)
"""Temperature, top-k and top-p that change nothing."""


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """Repetition-aware sampling: a code that at least `most` of the last `window` rows have in the same codebook is
    drawn again from the whole distribution."""

    window: int
    most: int


def repetition_rule(generation: GenerationConfig) -> RepetitionRule | None:
    """That of `generation_config.json`; None if it has none. Raises `ConfigError`."""
    names = ("ras_win_len", "ras_win_max_num_repeat")
    values: dict[str, Any] = {name: getattr(generation, name, None) for name in names}
    if None in values.values():
        return None
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"generation_config.json: {name} is {value!r}; it must be at least 1", field="model")
    return RepetitionRule(values["ras_win_len"], values["ras_win_max_num_repeat"])


class Heads:
    """Draws rows: `DrawsByHead`."""

    def __init__(self, head: nn.Module, config: HiggsAudioV2Config, rule: RepetitionRule | None) -> None:
        self._head, self._rule = head, rule
        self._groups, self._codes = config.num_codebooks, config.codebook_size
        self._begin, self._end = config.audio_stream_bos_id, config.audio_stream_eos_id
        self.looks_back = max(self._groups, 0 if rule is None else rule.window)
        self.draws_per_row = 2 * self._groups - 1
        """For codes 1 to K - 1, and for those that are drawn again."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] → [n, K, V] float32."""
        return self._head(hidden).float().view(-1, self._groups, self._codes)

    def __call__(self, hidden: Tensor, first: Tensor, draws: Draws) -> Tensor:
        """[n, H], [n] codes 0 as they were drawn → [n, K]."""
        assert draws.recent is not None
        recent = draws.recent
        logits = self.logits(hidden)
        rows = torch.cat([first[:, None], draws.heads(logits[:, 1:], 0)], dim=1)
        books = torch.arange(self._groups, device=rows.device)
        before = (recent[:, :, 0] >= 0).sum(dim=1, keepdim=True)
        rows = torch.where(books >= before, self._begin, rows)
        ending = (recent == self._end).any(dim=2).long()  # from a row with the end on, all rows have it
        rows = torch.where(books < ending.sum(dim=1, keepdim=True), self._end, rows)
        return rows if self._rule is None else self._varied(rows, logits, recent, draws, self._rule)

    def _varied(self, rows: Tensor, logits: Tensor, recent: Tensor, draws: Draws, rule: RepetitionRule) -> Tensor:
        """The rows, with repeated codes drawn again. Greedy requests keep them."""
        within = recent[:, -rule.window :]
        same = (within == rows[:, None]) & (within != self._begin) & (within != self._end)
        repeated = (same.sum(dim=1) >= rule.most) & ~draws.greedy[:, None]
        plain = logits.new_zeros(len(rows), len(_UNFILTERED), dtype=torch.float64)
        for place, value in enumerate(_UNFILTERED):  # copying them from the host would make it wait
            plain[:, place] = value
        return torch.where(repeated, draws.heads(logits, self._groups - 1, plain), rows)
