"""The training of the demo's model: its questions, its sequences against the library's, and resuming."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
from dataclasses import replace
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
    from demo_model.training.checkpoint import create

    directory = tmp_path_factory.mktemp("demo")
    create(directory)
    return directory


@pytest.fixture(scope="module")
def model(untrained: Path) -> Any:
    """As it is trained, with the training's own functions in it."""
    from demo_model.training import networks

    model = networks.Qwen3OmniMoeForConditionalGeneration.from_pretrained(untrained, dtype=torch.float32)
    networks.prepare(model, torch.device("cpu"))
    return model.eval()


def test_an_answer_is_right_for_its_own_question_only() -> None:
    from demo_model.data import questions, scenes

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


def test_pictures_are_painted_beside_others_as_alone() -> None:
    """What lies at a thing's centre has its colour, however many things the other pictures have."""
    from demo_model.data import scenes

    rng = random.Random(5)
    made = [scenes.draw_scene(rng, count, count) for count in (7, 1, 4)]
    pictures = scenes.painted(scenes.canvas(made)).float()
    known = torch.tensor(list(scenes.COLOURS.values()))
    for scene, pixels in zip(made, pictures, strict=True):
        for thing in scene.things:
            distances = (pixels[int(thing.y), int(thing.x)] - known).abs().amax(1)
            assert list(scenes.COLOURS)[int(distances.argmin())] == thing.colour


def test_pixels_and_positions_are_those_of_the_library(untrained: Path, model: Any) -> None:
    """And a question among others about a picture gets the logits that the library gives it alone."""
    from demo_model.data import answers, scenes
    from demo_model.data.prompts import encode
    from demo_model.data.questions import STYLES
    from demo_model.training import see
    from PIL import Image

    from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor

    processor = Qwen3OmniMoeProcessor.from_pretrained(untrained)
    library = Qwen3OmniMoeForConditionalGeneration.from_pretrained(untrained, dtype=torch.float32).eval()
    for kind in answers.KINDS[2:4]:
        scene, style, asked = answers.asked(kind, random.Random(1), 3)
        assert scene is not None
        frames = scenes.clip(scene)
        batch = answers.Sequences(untrained, 1, [kind], 3).batch(kind, [(scene, style, asked)])
        assert batch.drawn is not None
        quiet = replace(batch, drawn=replace(batch.drawn, noise=torch.zeros(len(frames))))
        frames = scenes.painted(quiet.drawn).numpy()
        with torch.no_grad():
            loss, values = see.answer_loss(model, quiet, 0)
        losses = []
        for one in asked:
            media = {"picture": "<|image_pad|>", "clip": "<|video_pad|>"}[kind]
            system = f"<|im_start|>system\n{STYLES[style]}<|im_end|>\n" if style else ""
            start = f"{system}<|im_start|>user\n<|vision_start|>{media}<|vision_end|>{one.text}<|im_end|>\n"
            given: dict[str, Any] = {"images": [Image.fromarray(frames[0])]}
            if kind == "clip":
                given = {"videos": [frames], "videos_kwargs": {"fps": 2.0, "input_data_format": "channels_last"}}
            text = f"{start}<|im_start|>assistant\n{one.answer}<|im_end|>"
            inputs = processor(text=text, return_tensors="pt", **given)
            answer = len(encode(untrained, f"{one.answer}<|im_end|>"))
            with torch.no_grad():
                logits = library.thinker(**inputs).logits[0, -answer - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, inputs["input_ids"][0, -answer:], reduction="none"))
        assert values[f"{kind} loss"].item() == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)
        assert loss.item() > values[f"{kind} loss"].item()  # and the experts' balance
    still, moved = scenes.draw_scene(random.Random(2)), scenes.draw_scene(random.Random(3))
    assert np.array_equal(scenes.picture(still), scenes.picture(still))
    assert not np.array_equal(scenes.picture(still), scenes.picture(moved))


def test_spectra_rows_and_experts_are_those_of_the_library(untrained: Path, model: Any) -> None:
    """Recordings at once give what the library gives each, and experts do with their tokens side by side."""
    from demo_model.data import recordings
    from demo_model.data.prompts import rows_of
    from demo_model.training import hear, networks
    from transformers import WhisperFeatureExtractor

    from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration

    library = Qwen3OmniMoeForConditionalGeneration.from_pretrained(untrained, dtype=torch.float32).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(untrained)
    rng = np.random.default_rng(0)
    sounds = [rng.normal(0, 0.1, length).astype(np.float32) for length in (40_000, 16_160, 160_123)]
    given = recordings.recordings(sounds)
    mels = hear.spectra(given)
    with torch.no_grad():
        rows = networks.heard(model, mels, given.lengths)
    for number, (one, length) in enumerate(zip(sounds, given.lengths, strict=True)):
        wanted = extractor(one, sampling_rate=recordings.HEARD_RATE, padding=True, return_tensors="pt").input_features[
            0
        ]
        assert torch.allclose(mels[number, :, :length], wanted[:, :length], atol=2e-2)  # int16 on the way
        with torch.no_grad():
            alone = networks.audio_encoder(library)(mels[number, :, :length], feature_lens=torch.tensor([length]))
        mine, rows = rows.split([rows_of(length), len(rows) - rows_of(length)])
        assert torch.allclose(mine, alone.last_hidden_state, atol=1e-4)
    assert not len(rows)
    experts = networks.language_model(library).layers[0].mlp.experts
    states = torch.randn(7, experts.hidden_dim)
    chosen = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(7)])
    weights = torch.rand(7, 2)
    assert torch.allclose(
        networks.sorted_experts(experts, states, chosen, weights), experts(states, chosen, weights), atol=1e-5
    )


@pytest.mark.nightly
def test_each_part_leaves_a_checkpoint_that_the_library_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of each, in order; each changes its own half, and what earlier ones have learned stays."""
    pytest.importorskip("espeakng_loader")
    from demo_model.training import schedule, steps
    from demo_model.training.checkpoint import create

    from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeForConditionalGeneration

    changes = {
        "codec": ("code2wav", "code_embedding"),
        "vocoder": ("code2wav", "decoder"),
        "vision": ("thinker", "visual"),
        "dictation": ("thinker", "audio_tower"),
        "answers": ("thinker", "lm_head"),
        "hearing": ("thinker", "audio_tower"),
        "speaking": ("talker", "code_predictor"),
    }
    assert [*changes] == [*schedule.PARTS]
    monkeypatch.setitem(schedule.SIZES, "cpu", dict.fromkeys(changes, 2) | {"codec": 60})
    monkeypatch.setattr(steps, "WARM_UP", 1)  # else a step is smaller than what bfloat16 can hold
    directory = tmp_path / "model"
    create(directory)
    options = schedule.Options(directory, torch.device("cpu"), workers=0, threads=1)
    options.training.mkdir()

    def weights() -> dict[str, torch.Tensor]:
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, dtype=torch.bfloat16)
        return dict(model.state_dict())

    schedule.assemble(options)
    before = weights()
    for name, (half, part) in changes.items():
        schedule.train_one(name, options, schedule.limits(name, 1, None))
        schedule.assemble(options)
        after = weights()
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert any(part in key for key in changed), (name, changed)
        assert all(key.startswith(half) for key in changed), (name, changed)
        before = after


@pytest.mark.nightly
def test_resumed_training_equals_an_uninterrupted_one(untrained: Path, tmp_path: Path) -> None:
    """And training by time ends with it, at a low rate."""
    from demo_model.training import networks, see
    from demo_model.training.steps import LOG, Limits, Part, logged, train

    def trained(directory: Path, limits: Limits, stops: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
        directory.mkdir(exist_ok=True)
        for stop in (*stops, None):
            torch.manual_seed(0)
            model = networks.Qwen3OmniMoeForConditionalGeneration.from_pretrained(untrained, dtype=torch.float32)
            networks.prepare(model, torch.device("cpu"))
            whole = see.encoder_part(model, size=2)

            def loss(batch: Any, step: int, stop: int | None = stop, whole: Part = whole) -> Any:
                if step == stop:
                    raise KeyboardInterrupt
                return whole.loss(batch, step)

            with contextlib.suppress(KeyboardInterrupt):
                train(replace(whole, loss=loss), limits, directory, device=torch.device("cpu"), saved_every=0)
        return dict(networks.vision(model).state_dict())

    once = trained(tmp_path / "once", Limits(steps=5))
    twice = trained(tmp_path / "twice", Limits(steps=5), (0, 2, 4))
    assert all(torch.equal(once[name], twice[name]) for name in once)
    # further, from a checkpoint of which nothing but the log is left: for as many steps more, at its own rate
    for name in ("once", "twice"):
        (tmp_path / name / "vision.pt").unlink()
    further = trained(tmp_path / "once", Limits(steps=3))
    again = trained(tmp_path / "twice", Limits(steps=3), (6, 7))
    assert all(torch.equal(further[name], again[name]) for name in further)
    assert logged(tmp_path / "twice" / LOG, "vision") == 8
    assert any(not torch.equal(once[name], further[name]) for name in once)
    before = networks.Qwen3OmniMoeForConditionalGeneration.from_pretrained(untrained, dtype=torch.float32)
    assert not torch.equal(networks.vision(before).patch_embed.proj.weight, once["patch_embed.proj.weight"])
    trained(tmp_path / "timed", Limits(minutes=0.02))
    last = json.loads((tmp_path / "timed" / LOG).read_text().splitlines()[-1])
    assert last["seconds"] >= 1.2


def test_sound_becomes_spectra_and_codes(untrained: Path, model: Any) -> None:
    pytest.importorskip("espeakng_loader")
    from demo_model.data import sayings
    from demo_model.data.prompts import rows_of
    from demo_model.data.recordings import SpokenSequences
    from demo_model.training import codec

    heard = SpokenSequences(untrained, 2, ["nothing"], 2).spoken(0)
    assert heard.said is not None
    assert min(heard.said.lengths) > 50
    assert int((heard.answers.ids == model.config.thinker_config.audio_token_id).sum()) == sum(
        rows_of(length) for length in heard.said.lengths
    )
    learning = codec.Codec(model.code2wav, codec.Encoder(model.config.code2wav_config))
    clip = sayings.loudness(sayings.clips(0, size=2))
    learning.learn(list(sayings.clips(0, size=2)))
    codes = learning.encode(clip)
    assert codes.shape == (2, clip.shape[1] // sayings.FRAME, model.code2wav.config.num_quantizers)
    with torch.no_grad():
        rows = learning.told(codes)
        whole = model.code2wav(codes.transpose(1, 2))[:, 0]
        assert torch.allclose(learning.decode(rows).clamp(-1, 1), whole, atol=1e-5)
    assert whole.shape[1] == clip.shape[1] - codec.LOST


@pytest.mark.parametrize("kind", ["none", "causal", "visible", "added"])
def test_plain_attention_is_the_librarys(kind: str) -> None:
    from demo_model.training.steps import PlainAttention

    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    masks: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"is_causal": True},
        "visible": {"attn_mask": torch.rand(2, 1, 5, 5) < 0.5 + torch.eye(5)},
        "added": {"attn_mask": torch.randn(2, 1, 5, 5), "scale": 0.3},
    }
    attend = torch.nn.functional.scaled_dot_product_attention
    wanted = attend(query, key, value, enable_gqa=True, **masks[kind])
    with PlainAttention():
        found = attend(query, key, value, enable_gqa=True, **masks[kind])
    torch.testing.assert_close(found, wanted)


def test_words_are_counted_as_mistaken_once() -> None:
    from demo_model.evaluate import mistakes

    said = ["there", "are", "two", "red", "circles"]
    for heard, wrong in (("there are two red circles", 0), ("their are two circles", 2), ("there are two red two", 1)):
        assert mistakes(said, heard.split()) == wrong
    assert mistakes(said, []) == mistakes([], said) == 5


def test_codebooks_learn_what_is_to_be_told(model: Any) -> None:
    """Each group tells what those before it leave."""
    pytest.importorskip("espeakng_loader")
    from demo_model.data import sayings
    from demo_model.training import codec

    code2wav = copy.deepcopy(model.code2wav)
    code2wav.code_embedding.requires_grad_(False)
    learning = codec.Codec(code2wav, codec.Encoder(code2wav.config))
    clips = sayings.clips(1, size=60)
    values = learning.learn(list(clips))
    left = [values[f"left {group}"] for group in range(code2wav.config.num_quantizers)]
    assert left == sorted(left, reverse=True)
    assert left[-1] < 0.05 < left[0] < 0.5
    samples = sayings.loudness(clips)
    codes = learning.encode(samples)
    assert (learning.encoder(samples) - learning.told(codes)).square().mean() == pytest.approx(left[-1], rel=0.01)


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (16, 8, 5)])
def test_a_step_is_as_long_in_all_directions(shape: tuple[int, ...]) -> None:
    """Also where the gradient is mostly one of them."""
    from demo_model.training.muon import Muon

    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = Muon([weight], lr=0.1)
    weight.grad = torch.randn(shape) + 20 * torch.ones(shape)
    optimizer.step()
    matrix = weight.detach().flatten(1)
    lengths = torch.linalg.svdvals(matrix) / (0.1 * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)
    assert lengths.max() < 1.3
    assert lengths.median() > 0.5
