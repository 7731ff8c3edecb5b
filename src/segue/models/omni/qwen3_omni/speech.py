"""What the talker needs besides its decoder: which tokens of a conversation it hears, and the code predictor.

T tokens of the thinker's prompt, E width of the talker, G codes per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.engines.autoregressive.contract import Draws
from segue.messages.errors import InvalidRequest
from segue.models.omni.qwen3_omni.library import (
    DynamicCache,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

TOP_K, TOP_P = 50, 0.8
"""How `generate` samples the codes after the first, whatever the caller says; greedily if the talker is greedy."""


def user_tokens(ids: torch.Tensor, config: Qwen3OmniMoeConfig) -> torch.Tensor:
    """[T] ids → [T] bool: the tokens of user turns. Raises `InvalidRequest` if there is none."""
    places = torch.arange(len(ids))
    starts = torch.where(ids == config.im_start_token_id, places, -1).cummax(0).values.clamp_min(0)
    user = ids[(starts + 1).clamp_max(len(ids) - 1)] == config.user_token_id
    if not user.any():
        raise _unspoken("user")
    return user


def media_in(
    media: Sequence[dict[str, Any]], ids: torch.Tensor, heard: torch.Tensor, config: Qwen3OmniMoeConfig
) -> list[dict[str, Any]]:
    """The media, in order, that begin in the tokens `heard` [T] bool of the prompt `ids` [T]."""
    thinker = config.thinker_config
    begins = {
        "vision": heard[ids == thinker.vision_start_token_id].tolist(),
        "audio": heard[ids == thinker.audio_start_token_id].tolist(),
    }
    found = []
    for medium in media:
        begun = begins["audio" if medium["kind"] == "audio" else "vision"]
        if not begun or begun.pop(0):  # ids of the caller's own may lack the tokens before media
            found.append(medium)
    return found


def assistant_turn(ids: torch.Tensor, config: Qwen3OmniMoeConfig) -> int:
    """Where the last assistant turn of the prompt begins. Raises `InvalidRequest` if there is none."""
    begins = (ids[:-1] == config.im_start_token_id) & (ids[1:] == config.assistant_token_id)
    found = begins.nonzero()[:, 0]
    if not len(found):
        raise _unspoken("assistant")
    return int(found[-1])


def _unspoken(role: str) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has no turn of the {role}, so its reply cannot be spoken; send messages, or ask for text alone",
        field="modalities",
    )


class CodePredictor:
    """Draws the codes of a row after the first: the library's predictor reads the talker's hidden state and code 0,
    then each code that it has drawn; a head per code."""

    def __init__(self, talker: Qwen3OmniMoeTalkerForConditionalGeneration) -> None:
        predictor = talker.code_predictor
        predictor.set_attn_implementation("sdpa")
        self._model, self._heads = predictor.model, predictor.lm_head
        self._masks = dict.fromkeys(predictor.config.layer_types)  # None: causal

    def embed(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """[n] codes of a group from 1 on → [n, E]."""
        rows: torch.Tensor = self._model.codec_embedding[group - 1](codes)
        return rows

    def __call__(self, hidden: torch.Tensor, first: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, E] final hidden states, [n, E] embeddings of codes 0 → [n, G - 1]."""
        cache = DynamicCache(config=self._model.config)
        codes: list[torch.Tensor] = []
        rows = torch.stack([hidden, first], dim=1)
        for group in range(1, len(self._heads) + 1):
            begin = 0 if group == 1 else group
            positions = torch.arange(begin, begin + rows.shape[1], device=rows.device)[None]
            out = self._model(
                inputs_embeds=rows,
                position_ids=positions,
                attention_mask=self._masks,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
            codes.append(draws.code(group, self._heads[group - 1](out).float(), top_k=TOP_K, top_p=TOP_P))
            rows = self.embed(group, codes[-1])[:, None]
        return torch.stack(codes, dim=1)
