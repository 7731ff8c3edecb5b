"""The training of the demo's model: its questions, its sequences against the library's, and resuming."""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[4] / "examples" / "demo_model"


@pytest.fixture(scope="module", autouse=True)
def package() -> Any:
    """Makes the example importable."""
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from demo_model.checkpoint import create

    directory = tmp_path_factory.mktemp("demo")
    create(directory)
    return directory


@pytest.fixture(scope="module")
def model(untrained: Path) -> Any:
    from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration

    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(untrained, dtype=torch.float32).eval()


def test_an_answer_is_right_for_its_own_question_only() -> None:
    from demo_model import questions, scenes

    rng = random.Random(0)
    kinds = set()
    for style in questions.STYLES:
        for _ in range(60):
            asked = questions.about_picture(scenes.draw_scene(rng), rng, style, 2)
            asked += questions.about_clip(scenes.draw_clip(rng), rng, style, 1)
            for one in [*asked, *questions.without_picture(rng, style, 1)]:
                assert questions.is_right(one, one.answer), one
                assert not questions.is_right(one, one.answer + " 7 stars, or nine red circles")
                assert style != "json" or json.loads(one.answer)
                kinds.add(one.kind)
    assert len(kinds) == 18
    where = questions.Question("where", "Where is the star?", "It is on the top left.", ("top left",))
    assert questions.is_right(where, '{"place": "top left"}')
    assert not questions.is_right(where, "It is at the top.")
    assert not questions.is_right(where, '{"place": "top left"')


def test_pixels_and_positions_are_those_of_the_library(untrained: Path, model: Any) -> None:
    """And a question among others about a picture gets the logits that the library gives it alone."""
    from demo_model import scenes, see
    from PIL import Image

    from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeProcessor

    processor = Qwen3OmniMoeProcessor.from_pretrained(untrained)
    for kind in see.KINDS[2:4]:
        frames, style, asked = see.asked(kind, random.Random(1), 3)
        batch = see.Sequences(untrained, 1, [kind], 3).batch(kind, [(frames, style, asked)])
        with torch.no_grad():
            loss, values = see.answer_loss(model, batch)
        losses = []
        for one in asked:
            media = {"picture": "<|image_pad|>", "clip": "<|video_pad|>"}[kind]
            system = f"<|im_start|>system\n{see.STYLES[style]}<|im_end|>\n" if style else ""
            start = f"{system}<|im_start|>user\n<|vision_start|>{media}<|vision_end|>{one.text}<|im_end|>\n"
            given: dict[str, Any] = {"images": [Image.fromarray(frames[0])]}
            if kind == "clip":
                given = {"videos": [frames], "videos_kwargs": {"fps": 2.0, "input_data_format": "channels_last"}}
            text = f"{start}<|im_start|>assistant\n{one.answer}<|im_end|>"
            inputs = processor(text=text, return_tensors="pt", **given)
            answer = len(see.encode(untrained, f"{one.answer}<|im_end|>"))
            with torch.no_grad():
                logits = model.thinker(**inputs).logits[0, -answer - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, -answer:], reduction="none"))
        assert values[f"{kind}_loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)
        assert loss.item() > values[f"{kind}_loss"]  # and the experts' balance
    still = scenes.picture(scenes.draw_scene(random.Random(2)))
    moved = np.roll(still, 1, axis=1)
    assert not np.array_equal(see.patches(still[None]), see.patches(moved[None]))


def test_resumed_training_equals_an_uninterrupted_one(untrained: Path, tmp_path: Path) -> None:
    from demo_model import see
    from demo_model.training import Part, train

    from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration

    def trained(directory: Path, *stops: float) -> tuple[dict[str, torch.Tensor], list[bool]]:
        finished = []
        for minutes in stops:
            torch.manual_seed(0)
            model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(untrained, dtype=torch.float32)
            whole = see.encoder_part(model)
            part = Part("vision", whole.modules, partial(see.cells, size=2), whole.loss)
            finished.append(train(part, 3, directory, minutes=minutes))
        return dict(see.vision(model).state_dict()), finished

    once, [done] = trained(tmp_path / "once", 10)
    twice, dones = trained(tmp_path / "twice", 0, 0, 10)
    assert [done, *dones] == [True, False, False, True]
    assert all(torch.equal(once[name], twice[name]) for name in once)
    before = Qwen3OmniMoeForConditionalGeneration.from_pretrained(untrained, dtype=torch.float32)
    assert not torch.equal(see.vision(before).patch_embed.proj.weight, once["patch_embed.proj.weight"])


def test_sound_becomes_spectra_and_codes(untrained: Path, model: Any) -> None:
    pytest.importorskip("espeakng_loader")
    from demo_model import codec, hear

    [wanted] = hear.SpokenSequences(untrained, 1, ["nothing"], 1)(0).lengths.tolist()
    assert wanted > 50
    heard = hear.SpokenSequences(untrained, 2, ["nothing"], 2)(0)
    assert int((heard.ids == model.config.thinker_config.audio_token_id).sum()) == sum(
        hear.rows_of(length) for length in heard.lengths.tolist()
    )
    learning = codec.Codec(model.code2wav)
    clip = codec.clips(0, size=2)
    codes = learning.encode(clip.samples)
    assert codes.shape == (2, clip.samples.shape[1] // codec.FRAME, model.code2wav.config.num_quantizers)
    with torch.no_grad():
        rows = torch.stack([books[codes[..., index]] for index, books in enumerate(learning.codebooks())]).sum(0)
        whole = model.code2wav(codes.transpose(1, 2))[:, 0]
        assert torch.allclose(learning.decode(rows).clamp(-1, 1), whole, atol=1e-5)
    assert whole.shape[1] == clip.samples.shape[1] - codec.LOST
