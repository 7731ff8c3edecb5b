"""The workload of the vLLM-Omni paper (arXiv 2602.02204): audio, image and video queries in equal parts, 100 of each.

The paper takes them from LibriSpeech, Food-101 and UCF-101. No data set is used here: media are cut from the files of
`assets/`, repeated where these are too short or too small, and only their lengths and sizes are those of the data sets,
drawn from the distributions below. Replies have the lengths of the `mixed` workload.

- **Audio** (LibriSpeech: utterances of 1 to 35 s, 12.3 s on average, 16 kHz): 1 + 34·Beta(5, 10) seconds, whose mean is
  12.3 and whose standard deviation is 4.0.
- **Images** (Food-101: photos whose longer side has at most 512 pixels): the longer side has 512 pixels; half of the
  photos are square, the others have sides of 4:3 or 3:2, in either orientation.
- **Video** (UCF-101: 320×240 at 25 frames/s, clips of 1.06 to 71.04 s, 7.2 s on average): the logarithm of the seconds
  is normal with a standard deviation of 0.5, so that the mean is 7.2; values out of range are drawn again. Requests
  carry the frames that a processor samples, 2 per second, an even number of at least 4.
"""

from __future__ import annotations

import math
import random

import numpy as np

from segue.bench.omni.workload import (
    AUDIO_RATE,
    CLIP_STRIDE,
    VIDEO_FPS,
    Kind,
    Workload,
    medium,
    spoken,
)
from segue.messages.request import MediaPart

SHORTEST_AUDIO, LONGEST_AUDIO = 1.0, 35.0
"""Seconds of an utterance."""
LONGER_SIDE = 512
"""Pixels of a photo."""
SHORTER_SIDES = (512, 512, 384, 341)
"""Drawn with equal chances."""
VIDEO_SIZE = (240, 320)
"""Height and width in pixels."""
SHORTEST_VIDEO, LONGEST_VIDEO, MEAN_VIDEO = 1.06, 71.04, 7.2
"""Seconds of a clip."""
_SIGMA = 0.5
FEWEST_FRAMES = 4


class PaperWorkload(Workload):
    """All requests by index; equal arguments give equal requests."""

    kinds: tuple[Kind, ...] = ("audio", "image", "video")
    name = "paper"
    count = 300

    def _image(self, draw: random.Random) -> MediaPart:
        sides = [LONGER_SIDE, draw.choice(SHORTER_SIDES)]
        draw.shuffle(sides)
        return medium("image", _window(self._material.photo, sides[0], sides[1], draw))

    def _audio(self, draw: random.Random) -> MediaPart:
        return spoken(self._material, round(audio_seconds(draw) * AUDIO_RATE), draw)

    def _video(self, draw: random.Random) -> MediaPart:
        frames = max(FEWEST_FRAMES, 2 * round(video_seconds(draw) * VIDEO_FPS / 2))
        clip = self._material.clip
        shown = (draw.randrange(len(clip)) + CLIP_STRIDE * np.arange(frames)) % len(clip)
        return medium("video", _window(clip, *VIDEO_SIZE, draw)[shown], VIDEO_FPS)


def audio_seconds(draw: random.Random) -> float:
    """The length of an utterance."""
    return SHORTEST_AUDIO + (LONGEST_AUDIO - SHORTEST_AUDIO) * draw.betavariate(5, 10)


def video_seconds(draw: random.Random) -> float:
    """The length of a clip."""
    while True:
        seconds = draw.lognormvariate(math.log(MEAN_VIDEO) - _SIGMA**2 / 2, _SIGMA)
        if SHORTEST_VIDEO <= seconds <= LONGEST_VIDEO:
            return seconds


def _window(image: np.ndarray, height: int, width: int, draw: random.Random) -> np.ndarray:
    """[…, H, W, 3] → […, height, width, 3] from a random position; beyond its borders the image is repeated."""
    rows = (draw.randrange(image.shape[-3]) + np.arange(height)) % image.shape[-3]
    columns = (draw.randrange(image.shape[-2]) + np.arange(width)) % image.shape[-2]
    return image[..., rows[:, None], columns, :]
