"""How the thinker's `generate` would sample and end, read from the checkpoint."""

from __future__ import annotations

from pathlib import Path

from segue.models.checkpoint_values import GENERATION
from segue.models.generation import end_tokens, generation_in, generation_of
from segue.models.qwen2_5_omni.library import GenerationConfig, PreTrainedTokenizerBase, Qwen2_5OmniThinkerConfig

MAX_NEW_TOKENS = 1024
"""`thinker_max_new_tokens` of the reference's `generate`."""


def thinker_generation(config: Qwen2_5OmniThinkerConfig, model_dir: Path) -> GenerationConfig:
    """What `thinker.generate` goes by.

    The reference gives `generation_config.json` to the whole model only: the thinker inside takes its end tokens and
    its sampling from its own part of `config.json`.
    """
    return generation_in(config, model_dir)


def thinker_ends(
    generation: GenerationConfig,
    config: Qwen2_5OmniThinkerConfig,
    model_dir: Path,
    tokenizer: PreTrainedTokenizerBase | None,
) -> frozenset[int]:
    """The ids that end a reply: the thinker config's; where it names none (the reference would then never stop),
    `generation_config.json`'s, else the tokenizer's."""
    if generation.eos_token_id is None and (model_dir / GENERATION).is_file():
        generation = generation_of(model_dir, config)
    return end_tokens(generation, tokenizer)
