"""Read from the checkpoint how the thinker's `generate` would sample and stop."""

from __future__ import annotations

from pathlib import Path

from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen2_5_omni.library import GenerationConfig, PreTrainedTokenizerBase, Qwen2_5OmniThinkerConfig
from segue.models.shared.checkpoint.files import GENERATION
from segue.models.shared.decoder.generation import end_tokens, generation_in, generation_of

GENERATE = SamplingParams(max_tokens=1024)
"""What the reference's `generate` passes to the thinker: `thinker_max_new_tokens`."""


def thinker_generation(config: Qwen2_5OmniThinkerConfig, model_dir: Path) -> GenerationConfig:
    """The generation config that `thinker.generate` uses.

    The reference applies `generation_config.json` to the whole model only: the thinker inside it takes its end tokens
    and sampling from its own section of `config.json`.
    """
    return generation_in(config, model_dir)


def thinker_ends(
    generation: GenerationConfig,
    config: Qwen2_5OmniThinkerConfig,
    model_dir: Path,
    tokenizer: PreTrainedTokenizerBase | None,
) -> frozenset[int]:
    """The ids that end a reply: the thinker config's. If it names none (the reference would then never stop), those of
    `generation_config.json`, else the tokenizer's."""
    if generation.eos_token_id is None and (model_dir / GENERATION).is_file():
        generation = generation_of(model_dir, config)
    return end_tokens(generation, tokenizer)
