"""Sizes, texts and noise levels that a network or a scheduler has no places for are refused, and not found out by a
step that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_chain import Chain

from segue.messages.errors import TooLarge
from segue.models.images.qwen_image import tiny as qwen_image
from segue.models.images.stable_diffusion_3 import tiny as stable_diffusion_3
from segue.models.images.wan import tiny as wan

WORDS = "漢"
"""Several tokens of the tiny tokenizer."""


@pytest.mark.parametrize("size", [(16, 16_400), (16_400, 16)])
def test_sides_of_wan(tmp_path: Path, size: tuple[int, int]) -> None:
    """1024 tokens of 16 pixels, 8 pixels to a latent; the network has no more."""
    wan.make(tmp_path)
    chain = Chain(tmp_path)
    with pytest.raises(TooLarge, match="makes at most 16384"):
        chain.run({"prompt": "a wall", "num_frames": 1, "height": size[0], "width": size[1]})
    rope = chain.adapters["denoiser"].network.rope
    assert rope(torch.zeros(1, 16, 1, 2, 2048))[0].shape[1] == 1024
    with pytest.raises(RuntimeError):
        rope(torch.zeros(1, 16, 1, 2, 2050))


def test_sides_of_qwen_image(tmp_path: Path) -> None:
    """The text has the places behind the longest side: the longest text and the longest side just fit together."""
    qwen_image.make(tmp_path)
    chain = Chain(tmp_path)
    with pytest.raises(TooLarge, match="makes at most 98304"):
        chain.run({"prompt": "a wall", "height": 16, "width": 98_320})
    assert places(chain, 98_304, 1024) == 1024
    assert places(chain, 98_336, 1024) < 1024


def places(chain: Chain, width: int, text: int) -> int:
    """How many of so many tokens of a text Qwen-Image has places for, beside an image so wide."""
    positions = chain.adapters["denoiser"].network.pos_embed
    _, words = positions([[(1, 1, width // 16)]], device=torch.device("cpu"), max_txt_seq_len=text)
    return len(words)


def test_a_text_and_images_that_leave_no_place(tmp_path: Path) -> None:
    """Of an edit, what is written and what is asked for share the places."""
    qwen_image.make(tmp_path, pipeline="QwenImageEditPipeline")
    chain = Chain(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    asked: dict[str, Any] = {"image": image, "num_inference_steps": 2, "true_cfg_scale": 1.0, "height": 16}
    with pytest.raises(TooLarge) as refused:
        chain.run({**asked, "prompt": WORDS * 1000, "width": 65_536})
    assert refused.value.field == "width"
    fits = int(str(refused.value).split("may exceed ")[1].split()[0])
    assert 16 < fits < 65_536
    text = int(str(refused.value).split(": with ")[1].split()[0])
    assert places(chain, fits, text) == text > 3000
    assert places(chain, fits + 32, text) < text


def test_noise_levels_that_lie_close_together(tmp_path: Path) -> None:
    """Two timesteps of a shifted flow are the same there; it is stepped through all the same."""
    stable_diffusion_3.make(tmp_path)
    chain = Chain(tmp_path)
    asked = {"prompt": "a wall", "height": 64, "width": 64}
    [near] = chain.run({**asked, "sigmas": [0.9 + 2**-24, 0.9, 0.1]})
    assert near.progress == [(0, 1), (0, 2), (0, 3)]
    [same] = chain.run({**asked, "sigmas": [0.9, 0.1]})
    assert torch.allclose(near.pixels[0], same.pixels[0], atol=1e-2)
