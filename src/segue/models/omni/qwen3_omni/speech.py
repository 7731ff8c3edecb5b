"""Which tokens and media of a conversation the talker receives. T tokens of the thinker's prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from segue.messages.errors import InvalidRequest
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeConfig


def user_tokens(ids: torch.Tensor, config: Qwen3OmniMoeConfig) -> torch.Tensor:
    """[T] ids → [T] bool: the tokens of user turns. Raises `InvalidRequest` if there is none."""
    places = torch.arange(len(ids))
    starts = torch.where(ids == config.im_start_token_id, places, -1).cummax(0).values.clamp_min(0)
    user = ids[(starts + 1).clamp_max(len(ids) - 1)] == config.user_token_id
    if not user.any():
        raise _unspoken("user")
    return user


def media_in(
    media: Sequence[dict[str, Any]], ids: torch.Tensor, wanted: torch.Tensor, config: Qwen3OmniMoeConfig
) -> list[dict[str, Any]]:
    """The media, in order, that begin at tokens `wanted` [T] bool of the prompt `ids` [T]."""
    thinker = config.thinker_config
    begins = {
        "vision": wanted[ids == thinker.vision_start_token_id].tolist(),
        "audio": wanted[ids == thinker.audio_start_token_id].tolist(),
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
