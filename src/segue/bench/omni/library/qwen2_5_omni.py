"""Run Qwen2.5-Omni with `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segue.bench.omni.baseline import Options
from segue.bench.omni.library import reference

# after `reference`, which makes the import of a broken torchvision work
from transformers import (  # isort: skip
    LogitsProcessorList,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    StoppingCriteriaList,
)


class Reference(reference.Reference):
    """`Qwen2_5OmniForConditionalGeneration`."""

    config_class = Qwen2_5OmniConfig
    model_class = Qwen2_5OmniForConditionalGeneration
    # generate() in transformers 5.17–5.23 passes these to the talker, which refuses them, unless they are prefixed
    thinker_only = ("pixel_values", "pixel_values_videos")

    def thinker_arguments(self) -> dict[str, Any]:
        named = self.model.thinker.generation_config.eos_token_id
        return {"thinker_pad_token_id": named[0] if isinstance(named, list) else named}

    def talker_arguments(self, codes: Sequence[int]) -> dict[str, Any]:
        return {
            "talker_max_new_tokens": max(codes),
            "talker_eos_token_id": self.ends,
            "talker_logits_processor": LogitsProcessorList([self.talker_bans]),
            "talker_stopping_criteria": StoppingCriteriaList([reference.RowLimits(codes)]),
        }

    def _dummy(self, options: Options) -> Any:
        model = super()._dummy(options)
        model.load_speakers(str(Path(options.model_dir) / "spk_dict.pt"))
        return model
