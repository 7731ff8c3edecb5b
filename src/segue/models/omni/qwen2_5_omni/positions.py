"""M-RoPE positions of a prompt's tokens in time, height and width, from the library's own `get_rope_index`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from segue.engines.contract import Payload
from segue.messages.errors import InvalidRequest
from segue.models.omni.qwen2_5_omni.library import (
    Qwen2_5OmniPreTrainedModelForConditionalGeneration,
    Qwen2_5OmniThinkerConfig,
)


@dataclass(frozen=True, slots=True)
class MediumFacts:
    """The properties of a medium that determine positions and cache keys."""

    kind: str
    hash: bytes
    grid: tuple[int, int, int] | None = None
    """Images, clips: patches in time, height, width."""
    second_per_grid: float | None = None
    """Clips: seconds from one temporal patch to the next."""
    frames: int | None = None
    """Recordings: mel frames."""

    def digest(self, use_audio_in_video: bool) -> bytes:
        """A hash of content and position inputs; together with a row's index it identifies the row."""
        place = repr((self.kind, self.grid, self.second_per_grid, self.frames, use_audio_in_video))
        return hashlib.blake2b(self.hash + place.encode(), digest_size=16).digest()


def facts_of(item: Payload) -> MediumFacts:
    """Read them from one entry of the input stage's `media`."""
    grid = item.get("grid_thw")
    return MediumFacts(
        kind=item["kind"],
        hash=item["hash"],
        grid=None if grid is None else (int(grid[0]), int(grid[1]), int(grid[2])),
        second_per_grid=item.get("second_per_grid"),
        frames=item.get("frames"),
    )


class _RopeIndex(Qwen2_5OmniPreTrainedModelForConditionalGeneration):
    """A thinker without weights, to call `get_rope_index` on."""

    def __init__(self, config: Qwen2_5OmniThinkerConfig) -> None:
        super().__init__(config)
        self.spatial_merge_size = config.vision_config.spatial_merge_size


class Positions:
    """Computes the positions of a prompt's tokens and of the tokens that follow."""

    def __init__(self, config: Qwen2_5OmniThinkerConfig) -> None:
        self._index = _RopeIndex(config)

    def __call__(
        self, ids: torch.Tensor, media: list[MediumFacts], *, use_audio_in_video: bool
    ) -> tuple[torch.Tensor, int]:
        """[T] ids → ([3, T] long positions, delta: token T + i has position T + i + delta on all axes).

        Raises `InvalidRequest` if placeholders and media do not match.
        """
        images = [medium.grid for medium in media if medium.kind == "image"]
        videos = [medium.grid for medium in media if medium.kind == "video"]
        seconds = [medium.second_per_grid for medium in media if medium.kind == "video"]
        frames = [medium.frames for medium in media if medium.kind == "audio"]
        try:
            positions, delta = self._index.get_rope_index(
                ids[None],
                image_grid_thw=torch.tensor(images) if images else None,
                video_grid_thw=torch.tensor(videos) if videos else None,
                attention_mask=torch.ones_like(ids)[None],
                use_audio_in_video=use_audio_in_video,
                audio_seqlens=torch.tensor(frames) if frames else None,
                second_per_grids=torch.tensor(seconds) if videos else None,
            )
        except (IndexError, ValueError, RuntimeError, TypeError) as error:
            # the library raises these if the ids contain more, fewer or other media than were passed
            raise InvalidRequest(
                f"the prompt's placeholder tokens do not match its media ({error})", field="messages"
            ) from error
        return positions[:, 0], int(delta[0, 0])
