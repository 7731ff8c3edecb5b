"""Pictures on their way into a pipeline and out of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from segue.engines.contract import Payload
from segue.messages.errors import StageFailed

_NAMES = ("images", "frames", "videos")
"""Under which pipelines and blocks give what they make."""


def image_of(pixels: torch.Tensor) -> Image.Image:
    """Of [h, w, 3] uint8."""
    return Image.fromarray(pixels.cpu().numpy())


def pictures_of(output: Mapping[str, Any], outputs: int) -> np.ndarray:
    """[outputs, (frames,) h, w, 3]. Raises `StageFailed` for what is neither pictures nor video."""
    found = next((output[name] for name in _NAMES if output.get(name) is not None), None)
    made = np.asarray(found) if found is not None else np.zeros(0)
    if made.ndim not in (4, 5) or made.shape[-1] != 3 or len(made) != outputs:
        raise StageFailed(
            f"the pipeline gave {', '.join(output)} of shape {made.shape}, not {outputs} pictures or clips in colour"
        )
    return made


def shown(made: np.ndarray, index: int, fps: float) -> Payload:
    """One picture [h, w, 3] or clip [frames, h, w, 3] in [0, 1], as the client gets it."""
    pixels = torch.from_numpy((made * 255).round().astype(np.uint8))
    if pixels.ndim == 3:
        return {"image": pixels, "index": index}
    return {"video": pixels, "index": index, "fps": fps, "first": 0}
