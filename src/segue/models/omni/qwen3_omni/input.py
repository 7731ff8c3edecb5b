"""The input stage of Qwen3-Omni. `stages` documents the payload.

The library processes and encodes all recordings of a prompt (audio tracks included) in one call, padded to the longest:
the padding reaches the last spectra of the shorter ones, and the last rows of those under a second. So all media of a
prompt go through the processor in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image

from segue.engines.contract import LoadContext
from segue.media.audio import Samples
from segue.media.limits import MediaLimits
from segue.media.video import Video
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart
from segue.models.omni.qwen3_omni.family import voices
from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeProcessor
from segue.models.shared.omni.chat import Chat
from segue.models.shared.omni.input import OmniInput
from segue.models.shared.omni.medium import Decoded, Expanded, MediaReader

_PLACEHOLDERS = {"image": "<|image_pad|>", "audio": "<|audio_pad|>", "video": "<|video_pad|>"}
_BORDER = "<|im_end|>"
"""Stands after each medium's placeholder in the processor's text."""


class Reader(MediaReader):
    """Reads the media of a prompt by one call of the processor."""

    def __init__(self, chat: Chat, limits: MediaLimits) -> None:
        super().__init__(chat, limits)
        # processors of older versions do not name it; 50 is their default
        self._piece = 0 if chat.processor is None else 2 * getattr(chat.processor, "n_window", 50)

    def read(self, parts: Sequence[MediaPart], *, with_audio: bool) -> list[Expanded]:
        """As `MediaReader.read`. Raises `InvalidRequest`, too, for videos of different rates."""
        if not parts:
            return []
        media = [self.decoded(part, with_audio=with_audio) for part in parts]
        waves = _waves(media, parts)
        if waves and max(map(len, waves)) <= self.window // 2:  # the spectrum mirrors half a window at each end
            raise InvalidRequest(
                f"the longest audio of the prompt has {max(map(len, waves))} samples at {self.rate} Hz; at least "
                f"{self.window // 2 + 1} are needed",
                field="messages",
            )
        made = self._made(parts, media)
        longest = max((len(wave) for wave in waves), default=0)
        width = min(longest // self.hop, self._piece)
        audio = iter(
            [
                self.audio_entry(wave, features, mask, silence=min(longest - len(wave), self.window), width=width)
                for wave, features, mask in zip(
                    waves, made.get("input_features", ()), made.get("feature_attention_mask", ()), strict=True
                )
            ]
        )
        images, clips = _split(made, "pixel_values", "image"), _split(made, "pixel_values_videos", "video")
        seconds = iter(made.get("video_second_per_grid", ()))
        expanded = []
        for part, medium, ids in zip(parts, media, self._ids(made), strict=True):
            if isinstance(medium, Video):
                entries = [self.video_entry(medium, *next(clips), float(next(seconds)))]
                if medium.audio is not None:
                    entries.append(next(audio))
                ids = ids[1:-1]
            else:
                entries = [self.image_entry(medium, *next(images)) if part.kind == "image" else next(audio)]
            expanded.append(Expanded(ids, entries))
        return expanded

    def _made(self, parts: Sequence[MediaPart], media: Sequence[Decoded]) -> dict[str, Any]:
        """The processor's results; its text has the parts in order, with a border after each."""
        videos = [medium for medium in media if isinstance(medium, Video)]
        still = [medium for medium in media if not isinstance(medium, Video) and medium.ndim == 3]
        waves = _waves(media, parts)
        given: dict[str, Any] = {}
        if still:
            given["images"] = [Image.fromarray(pixels) for pixels in still]
        if waves:
            given["audio"] = waves
        if videos:
            [rate, *others] = {video.fps for video in videos}
            if others:  # the processor takes one rate for all
                raise InvalidRequest(
                    "the videos of a prompt have different frame rates after sampling; send them without a number of "
                    "frames",
                    field="messages",
                )
            given["videos"] = [video.frames for video in videos]
            given["videos_kwargs"] = {"fps": rate, "input_data_format": "channels_last"}
        texts = {kind: self._chat.placeholder(kind) for kind in ("image", "audio")}
        texts["video"] = self._chat.video_text()
        text = "".join(texts[part.kind] + _BORDER for part in parts)
        if not any(video.audio is not None for video in videos):
            return self._chat.expand(text, **given)
        return self._chat.expand_videos_with_audio(text, _origins(media, parts), **given)

    def _ids(self, made: dict[str, Any]) -> Iterator[list[int]]:
        """The ids of each medium."""
        border = self._chat.tokenizer.convert_tokens_to_ids(_BORDER)
        ids: list[int] = []
        for token in made["input_ids"][0].tolist():
            if token != border:
                ids.append(token)
            else:
                yield ids
                ids = []


class InputProcessor(OmniInput):
    """Prepares one request per call."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx, Qwen3OmniMoeProcessor, _PLACEHOLDERS, frozenset(voices(ctx.model_dir)), Reader)


def _waves(media: Sequence[Decoded], parts: Sequence[MediaPart]) -> list[Samples]:
    """All recordings of a prompt, audio tracks included, in order."""
    found: list[Samples] = []
    for medium, part in zip(media, parts, strict=True):
        if isinstance(medium, Video):
            found += [] if medium.audio is None else [medium.audio]
        elif part.kind == "audio":
            found.append(medium)
    return found


def _origins(media: Sequence[Decoded], parts: Sequence[MediaPart]) -> list[int | None]:
    """For each recording: the index of the video whose audio track it is, or None."""
    origins: list[int | None] = []
    videos = 0
    for medium, part in zip(media, parts, strict=True):
        if isinstance(medium, Video):
            origins += [] if medium.audio is None else [videos]
            videos += 1
        elif part.kind == "audio":
            origins.append(None)
    return origins


def _split(made: dict[str, Any], values: str, kind: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(patches, grid) of each image or clip."""
    grids = made.get(f"{kind}_grid_thw")
    if grids is not None:
        yield from zip(made[values].split(grids.prod(-1).tolist()), grids, strict=True)
