"""The example of a model of one's own, by itself: `generate` with its cache gives what whole forwards give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import segue.models.shared.library  # noqa: F401  (mends torchvision first, where that is needed)

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        from action_video import ActionVideoConfig, ActionVideoForGeneration
        from action_video.__main__ import TRUNK

        torch.manual_seed(0)
        made = ActionVideoForGeneration(ActionVideoConfig(image_size=48, image_channels=8, trunk=TRUNK))
        directory = tmp_path_factory.mktemp("action-video")
        made.save_pretrained(directory)
        yield ActionVideoForGeneration.from_pretrained(directory).eval()


@torch.inference_mode()
def test_frames_follow_actions_with_and_without_a_cache(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(2, 2, 3, 48, 48, generator=generator) * 2 - 1
    actions = torch.randn(2, 4, 6, 3, generator=generator)
    codes = model.image_tokenizer.encode(pixels.flatten(0, 1)).unflatten(0, (2, 2))
    made = model.imagine_codes(codes, actions)
    assert made.shape == (2, 3, 36)

    marks = codes.new_full((2, 6), model.config.action_token_id)
    sequence = torch.cat([part for frame in codes.unbind(1) for part in (frame, marks)], dim=1)
    for step, frame in zip((2, 3, 4), made.unbind(1), strict=True):
        for code in frame.unbind(1):
            logits = model(sequence, actions=actions[:, :step].flatten(1, 2)).logits
            assert torch.equal(logits[:, -1].argmax(-1), code)
            sequence = torch.cat([sequence, code[:, None]], dim=1)
        sequence = torch.cat([sequence, marks], dim=1)

    assert torch.equal(model.imagine_codes(codes[:1], actions[:1]), made[:1])
    assert (model.imagine_codes(codes, -actions) == made).float().mean() < 0.5
    assert len(made.unique()) > 50
    video = model.imagine(pixels, actions)
    assert torch.equal(video, model.image_tokenizer.decode(made.flatten(0, 1)).unflatten(0, (2, 3)))
