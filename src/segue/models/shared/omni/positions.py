"""M-RoPE positions of a prompt's tokens in time, height and width, from the library's own `get_rope_index`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from segue.engines.contract import Payload
from segue.messages.errors import InvalidRequest


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


class RopeIndex(Protocol):
    """A model of the library with `get_rope_index`; needs no weights."""

    def get_rope_index(
        self,
        input_ids: torch.Tensor,
        image_grid_thw: torch.Tensor | None,
        video_grid_thw: torch.Tensor | None,
        attention_mask: torch.Tensor,
        use_audio_in_video: bool,
        audio_seqlens: torch.Tensor | None,
        second_per_grids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T] ids → ([3, 1, T] positions, [1, 1] delta)."""


class Positions:
    """Computes the positions of a prompt's tokens and of the tokens that follow."""

    def __init__(self, index: RopeIndex) -> None:
        self._index = index

    def __call__(
        self, ids: torch.Tensor, media: list[MediumFacts], *, use_audio_in_video: bool
    ) -> tuple[torch.Tensor, int]:
        """[T] ids → ([3, T] long positions, delta: token T + i has position T + i + delta on all axes).

        Raises `InvalidRequest` if placeholders and media do not match, or a video's positions are fractions.
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
        whole = positions[:, 0].long()
        if not bool((whole == positions[:, 0]).all()):
            paces = ", ".join(f"{pace:g} s" for pace in seconds if pace is not None)
            raise InvalidRequest(
                f"the frames of a video, one temporal patch per {paces}, are not at whole steps of this model's clock; "
                "send the video without a number of frames",
                field="messages",
            )
        return whole, int(delta[0, 0])


def positions_of(kind: Callable[[Any], Any], config: Any) -> Positions:
    """By `get_rope_index` of the library's class `kind`, of which a model without weights is made. `config`: the
    thinker's."""
    index = kind(config)
    index.spatial_merge_size = config.vision_config.spatial_merge_size
    return Positions(index)
