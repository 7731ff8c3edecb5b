"""Convert images between payloads and a pipeline's inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from segue.engines.contract import Payload
from segue.messages.errors import StageFailed

_NAMES = ("images", "frames", "videos")
"""Names of the result in the outputs of pipelines and blocks."""


def image_of(pixels: torch.Tensor) -> Image.Image:
    """[h, w, 3] uint8 → image."""
    return Image.fromarray(pixels.cpu().numpy())


def images_of(output: Mapping[str, Any], outputs: int) -> np.ndarray:
    """[outputs, (frames,) h, w, 3]. Raises `StageFailed` if the output is neither images nor video."""
    found = next((output[name] for name in _NAMES if output.get(name) is not None), None)
    made = np.asarray(found) if found is not None else np.zeros(0)
    if made.ndim not in (4, 5) or made.shape[-1] != 3 or len(made) != outputs:
        raise StageFailed(
            f"the pipeline returned {', '.join(output)} of shape {made.shape}, not {outputs} images or clips in colour"
        )
    return made


def shown(made: np.ndarray, index: int, fps: float) -> Payload:
    """One image [h, w, 3] or clip [frames, h, w, 3] in [0, 1] → the client's payload."""
    pixels = torch.from_numpy((made * 255).round().astype(np.uint8))
    if pixels.ndim == 3:
        return {"image": pixels, "index": index}
    return {"video": pixels, "index": index, "fps": fps, "first": 0}
