"""The depth decoder: draws the codes of a row after the first.

n rows, H width of the backbone, K codes per row, V codes of the language models' vocabulary.
"""

from __future__ import annotations

import torch

from segue.engines.autoregressive.contract import Draws
from segue.messages.errors import ConfigError
from segue.models.shared.decoder.generation import TOP_K
from segue.models.shared.library import GenerationConfig
from segue.models.shared.speech.code_predictor import Filters
from segue.models.shared.speech.talker import SpokenCodes
from segue.models.speech.csm.library import DynamicCache
from segue.models.speech.csm.loading import LanguageModels

_PREFIX = "depth_decoder_"
"""In `generation_config.json`, of the depth decoder's own settings."""
_NEUTRAL = {"min_p": (None,), "typical_p": (None, 1.0), "repetition_penalty": (None, 1.0)}
"""Settings that are not applied, and the values at which they do nothing."""


def depth_sampling(generation: GenerationConfig) -> Filters:
    """How codes after the first are drawn: as the checkpoint's generation config has it for the depth decoder, greedily
    unless it sets `do_sample`. Raises `ConfigError` for a setting that is not supported."""
    given = {name.removeprefix(_PREFIX): value for name, value in vars(generation).items() if name.startswith(_PREFIX)}
    for name, values in _NEUTRAL.items():
        if given.get(name) not in values:
            raise ConfigError(
                f"generation_config.json: {_PREFIX}{name} is {given[name]!r}, which is not supported", field="model"
            )
    if not given.get("do_sample"):
        return Filters(top_k=1)
    known = {name: value for name, value in given.items() if value is not None}
    return Filters(known.get("temperature", 1.0), known.get("top_k", TOP_K), known.get("top_p", 1.0))


class DepthDecoder:
    """Runs the library's depth decoder: it reads the backbone's final hidden state and code 0, then each code that was
    drawn; a head per code."""

    def __init__(self, net: LanguageModels, filters: Filters, spoken: SpokenCodes) -> None:
        depth = net.depth_decoder
        depth.set_attn_implementation("sdpa")
        self._model, self._heads = depth.model, depth.codebooks_head.weight
        self._vocab: int = depth.config.vocab_size
        self._filters, self._spoken = filters, spoken

    def __call__(self, hidden: torch.Tensor, first: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, H] final hidden states, [n] codes 0 → [n, K - 1]."""
        cache = DynamicCache(config=self._model.config)
        codes: list[torch.Tensor] = []
        rows = torch.stack([hidden, self._model.embed_tokens(first)], dim=1)
        for group, head in enumerate(self._heads, 1):
            out = self._model(inputs_embeds=rows, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
            logits = self._spoken.only((out @ head).float())
            codes.append(self._filters.draw(draws, group, logits))
            rows = self._model.embed_tokens(codes[-1] + group * self._vocab)[:, None]
        return torch.stack(codes, dim=1)
