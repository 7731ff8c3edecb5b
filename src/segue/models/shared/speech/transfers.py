"""Transfers of the speech families."""

from __future__ import annotations

import torch

from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageOutput, StageRequest


def recordings(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → encoder: the recordings."""
    return None if output.payload is None else {"media": output.payload["media"]}


def prompt_ids(request: StageRequest, output: StageOutput) -> Payload | None:
    """input → language model: the text ids."""
    return None if output.payload is None else {"token_ids": output.payload["token_ids"]}


def code_rows(request: StageRequest, output: TokenOutput) -> Payload | None:
    """talker → vocoder: `{"codes": LongTensor [k, G], "start": int}`, the k rows of codes of a step; the first has
    index `start` in the request. Without the row of the talker's last token, which has no codes in the reference."""
    return _rows(output.codes[:-1] if output.finished else output.codes, output)


def rows_without_end(request: StageRequest, output: TokenOutput) -> Payload | None:
    """language model → vocoder: the same, without a last row whose codes are all the end's."""
    codes = output.codes
    # all codes but the last are known to be the end's
    if output.finish_reason == "stop" and codes and len(set(codes[-1])) == 1:
        codes = codes[:-1]
    return _rows(codes, output)


def _rows(codes: list[list[int]], output: TokenOutput) -> Payload | None:
    if not codes and not output.finished:
        return None
    return {"codes": torch.tensor(codes, dtype=torch.long), "start": output.first_index}
