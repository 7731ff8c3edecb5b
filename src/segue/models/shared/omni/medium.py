"""Decode one image, recording or clip → the processor's tensors, the ids that replace its placeholder, its hash."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from segue.engines.contract import Payload
from segue.media.audio import Samples, decode_audio
from segue.media.decode import refuse
from segue.media.image import decode_image
from segue.media.limits import MediaLimits
from segue.media.video import Video, decode_video
from segue.messages.request import MediaPart
from segue.models.shared.omni.chat import Chat

VIDEO_FPS = 2.0
"""Frames per second sampled from a video: the processor's own default."""
_LEAST_FRAMES = 500
"""Below about 100 mel frames the matmul rounds in another order than in a long recording."""
_STEEPEST = 200
"""The library's resizing (`smart_resize`) refuses images with a larger aspect ratio."""


Pixels = np.ndarray[Any, Any]
"""[height, width, 3] uint8."""
Decoded = np.ndarray[Any, Any] | Video
"""`Pixels` of an image, `Samples` of a recording, or a clip."""


@dataclass(frozen=True)
class Expanded:
    """One decoded and processed medium."""

    ids: list[int]
    """The ids that replace its placeholder."""
    entries: list[Payload]
    """Its entries in the payload's `media`: one; two for a video with its audio track."""


class MediaReader:
    """Reads the media of prompts for one checkpoint."""

    def __init__(self, chat: Chat, limits: MediaLimits) -> None:
        self._chat = chat
        self._limits = limits
        processor = chat.processor
        if processor is None:
            return
        self._settings = {
            "image": _digest(processor.image_processor.to_dict()),
            "audio": _digest(processor.feature_extractor.to_dict()),
            "video": _digest(processor.video_processor.to_dict()),
        }
        extractor = processor.feature_extractor
        self.rate, self.hop, self.window = extractor.sampling_rate, extractor.hop_length, extractor.n_fft
        self._longest = extractor.n_samples

    def read(self, parts: Sequence[MediaPart], *, with_audio: bool) -> list[Expanded]:
        """Decode the media of a prompt and process them. `with_audio`: include a video's audio track if it has one.

        Raises `InvalidRequest` for unreadable data, `TooLarge` over a limit.
        """
        return [self._read(part, with_audio=with_audio) for part in parts]

    def decoded(self, part: MediaPart, *, with_audio: bool) -> Decoded:
        """Decode one part; raises as `read`."""
        if part.kind == "image":
            pixels = decode_image(part, self._limits)
            _check_aspect(part, pixels.shape[0], pixels.shape[1])
            return pixels
        if part.kind == "audio":
            return decode_audio(part, self.rate, self._limits)
        video = decode_video(part, VIDEO_FPS, self._limits, audio_rate=self.rate if with_audio else None)
        _check_aspect(part, video.frames.shape[1], video.frames.shape[2])
        return video

    def image_entry(self, pixels: Pixels, values: torch.Tensor, grid: torch.Tensor) -> Payload:
        """The payload of an image and the processor's results for it."""
        return {
            "kind": "image",
            "hash": self._hash("image", pixels),
            "pixel_values": values,
            "grid_thw": grid.tolist(),
        }

    def video_entry(self, video: Video, values: torch.Tensor, grid: torch.Tensor, second_per_grid: float) -> Payload:
        """The payload of a clip and the processor's results for it, without its audio track."""
        return {
            "kind": "video",
            "hash": self._hash("video", video.frames, video.fps),
            "pixel_values": values,
            "grid_thw": grid.tolist(),
            "second_per_grid": second_per_grid,
        }

    def audio_entry(self, samples: Samples, features: torch.Tensor, mask: torch.Tensor, **facts: int) -> Payload:
        """The payload of a recording and the processor's results for it: [mel, frames], [frames]. `facts`: further
        entries, on which its rows depend."""
        frames = int(mask.sum())
        return {
            "kind": "audio",
            "hash": self._hash("audio", samples, *facts.values()),
            "input_features": features[:, :frames].contiguous(),
            **facts,
        }

    def _read(self, part: MediaPart, *, with_audio: bool) -> Expanded:
        medium = self.decoded(part, with_audio=with_audio)
        if isinstance(medium, Video):
            return self._video(medium)
        return self._image(medium) if part.kind == "image" else self._audio(part, medium)

    def _image(self, pixels: Pixels) -> Expanded:
        made = self._chat.expand(self._chat.placeholder("image"), images=[Image.fromarray(pixels)])
        entry = self.image_entry(pixels, made["pixel_values"], made["image_grid_thw"][0])
        return Expanded(made["input_ids"][0].tolist(), [entry])

    def _audio(self, part: MediaPart, samples: Samples) -> Expanded:
        text = self._chat.placeholder("audio")
        made = self._chat.expand(text, audio=[samples], audio_kwargs=self._audio_kwargs(samples))
        ids = made["input_ids"][0].tolist()
        if not ids:
            raise refuse(part, f"{len(samples)} samples are too short; send at least {4 * self.hop / self.rate:g} s")
        return Expanded(ids, [self.audio_entry(samples, made["input_features"][0], made["feature_attention_mask"][0])])

    def _video(self, video: Video) -> Expanded:
        media: dict[str, Any] = {
            "videos": [video.frames],
            "videos_kwargs": {"fps": video.fps, "input_data_format": "channels_last"},
        }
        text = self._chat.video_text()
        if video.audio is None:
            made = self._chat.expand(text, **media)
        else:
            media |= {"audio": [video.audio], "audio_kwargs": self._audio_kwargs(video.audio)}
            made = self._chat.expand_video_with_audio(text, **media)
        entries = [
            self.video_entry(
                video, made["pixel_values_videos"], made["video_grid_thw"][0], float(made["video_second_per_grid"][0])
            )
        ]
        if video.audio is not None:
            entries.append(self.audio_entry(video.audio, made["input_features"][0], made["feature_attention_mask"][0]))
        return Expanded(made["input_ids"][0].tolist()[1:-1], entries)

    def _audio_kwargs(self, samples: Samples) -> dict[str, Any]:
        """Pad with silence to a little more than the recording, not to the five minutes of the published processors
        (0.64 s of work): frames within the mask see the same samples, and the spectra of the padding are never
        computed."""
        hops = math.ceil(len(samples) / self.hop) + math.ceil(self.window / self.hop)
        hops = max(hops, _LEAST_FRAMES)
        return {"max_length": min(hops * self.hop, self._longest), "sampling_rate": self.rate}

    def _hash(self, kind: str, array: np.ndarray[Any, Any], *settings: float) -> bytes:
        """A hash that is equal for equal decoded media processed with equal settings."""
        digest = hashlib.blake2b(digest_size=32)
        digest.update(json.dumps([kind, self._settings[kind], str(array.dtype), array.shape, settings]).encode())
        digest.update(np.ascontiguousarray(array).data)
        return digest.digest()


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _check_aspect(part: MediaPart, height: int, width: int) -> None:
    if max(height, width) > _STEEPEST * min(height, width):
        raise refuse(
            part, f"{width} × {height} pixels are too narrow; one side may be at most {_STEEPEST} times the other"
        )
