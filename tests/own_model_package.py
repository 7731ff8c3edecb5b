"""What `pip install` makes of `examples/own_model`, and what the author's own loop gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import segue.models.shared.library  # noqa: F401  (mends torchvision first, where that is needed)

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_model"
SIDE = 48
PER_FRAME = (SIDE // 8) ** 2


@contextmanager
def installed(at: Path) -> Iterator[None]:
    """The package is installed, here and in the processes that are started."""
    for name in ("action_video", "segue_action_video"):
        (at / name).symlink_to(EXAMPLE / name)
    info = at / "segue_action_video-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: segue-action-video\nVersion: 1\n")
    assert 'action_video = "segue_action_video.family:FAMILY"' in (EXAMPLE / "pyproject.toml").read_text()
    (info / "entry_points.txt").write_text("[segue.models]\naction_video = segue_action_video.family:FAMILY\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(at))
        patch.setenv("PYTHONPATH", str(at), prepend=os.pathsep)
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("action_video", "segue_action_video")]:
        del sys.modules[name]


class Author:
    """A small checkpoint, and the author's model of it."""

    def __init__(self, directory: Path) -> None:
        from action_video import ActionVideoConfig, ActionVideoForGeneration
        from action_video.__main__ import TRUNK

        torch.manual_seed(0)
        config = ActionVideoConfig(image_size=SIDE, image_channels=8, trunk=TRUNK)
        ActionVideoForGeneration(config).save_pretrained(directory)
        self.directory = directory
        self.model: Any = ActionVideoForGeneration.from_pretrained(directory).eval()

    def imagine(self, frames: np.ndarray, actions: np.ndarray) -> tuple[list[int], np.ndarray]:
        """[f, h, w, 3] uint8, [n, 6, 3] → the codes of the new frames, and the frames [n - f + 1, h, w, 3] in [0, 255],
        not rounded."""
        pixels = torch.from_numpy(frames).movedim(-1, 1) / 127.5 - 1
        with torch.inference_mode():
            codes = self.model.image_tokenizer.encode(pixels)
            made = self.model.imagine_codes(codes[None], torch.from_numpy(actions)[None])[0]
            video = self.model.imagine(pixels[None], torch.from_numpy(actions)[None])[0]
        return made.flatten().tolist(), ((video / 2 + 0.5) * 255).movedim(1, -1).numpy()


def given(seed: int, frames: int, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Random frames and actions."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (frames, SIDE, SIDE, 3), dtype=np.uint8)
    return pixels, random.normal(size=(items, 6, 3)).astype(np.float32)


def prompt(frames: np.ndarray, actions: np.ndarray) -> dict[str, Any]:
    """What a caller of `Omni` writes."""
    content: list[dict[str, Any]] = [{"type": "image", "image": frame} for frame in frames]
    if len(actions):
        content.append({"type": "tensor", "name": "actions", "data": actions})
    return {"messages": [{"role": "user", "content": content}], "modalities": ["video"]}
