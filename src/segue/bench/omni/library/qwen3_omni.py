"""Run Qwen3-Omni with `transformers`.

A row of codes is complete one step of the talker after its first code, so speech ends by an end token after its codes,
as it does when the talker ends by itself. In a batch the library speaks the end token of replies that are shorter than
the longest one, so their codes differ from those that it makes for them alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from segue.bench.omni.baseline import Answer, Options
from segue.bench.omni.library import reference
from segue.bench.omni.workload import BenchRequest

# after `reference`, which makes the import of a broken torchvision work
from transformers import LogitsProcessorList, Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration  # isort: skip


class Reference(reference.Reference):
    """`Qwen3OmniMoeForConditionalGeneration`."""

    config_class = Qwen3OmniMoeConfig
    model_class = Qwen3OmniMoeForConditionalGeneration

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        # of batches with both images or video and audio the talker computes positions from this config
        self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config

    def generate(self, requests: Sequence[BenchRequest]) -> list[Answer]:
        with warnings.catch_warnings():
            # Segue, too, applies the penalty to codes alone
            warnings.filterwarnings("ignore", "Passing `repetition_penalty`")
            return super().generate(requests)

    def thinker_arguments(self) -> dict[str, Any]:
        end = self.model.config.im_end_token_id
        return {"thinker_eos_token_id": end, "thinker_pad_token_id": end}

    def talker_arguments(self, codes: Sequence[int]) -> dict[str, Any]:
        [end] = self.ends
        return {
            "talker_max_new_tokens": max(codes) + 1,
            "talker_pad_token_id": end,
            "talker_logits_processor": LogitsProcessorList([self.talker_bans, reference.RowEnds(codes, end)]),
        }
