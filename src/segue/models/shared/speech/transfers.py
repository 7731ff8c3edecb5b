"""Transfers to a vocoder."""

from __future__ import annotations

import torch

from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageRequest


def code_rows(request: StageRequest, output: TokenOutput) -> Payload | None:
    """talker → vocoder: `{"codes": LongTensor [k, G], "start": int}`, the k rows of codes of a step; the first has
    index `start` in the request. Without the row of the talker's last token, which has no codes in the reference."""
    codes = output.codes[:-1] if output.finished else output.codes
    if not codes and not output.finished:
        return None
    return {"codes": torch.tensor(codes, dtype=torch.long), "start": output.first_index}
