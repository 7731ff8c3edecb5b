"""The tiny checkpoint: the published layout, and weights on which a wrong server gives a wrong answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image
from qwen2_5_omni_family import decoder_in
from safetensors import safe_open

from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.media.video import decode_video
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart
from segue.models.omni.qwen2_5_omni.tiny import presets as tiny
from segue.models.omni.qwen2_5_omni.tiny.config import SHAPES, config_json
from segue.models.omni.qwen2_5_omni.tiny.weights import shapes_of

if TYPE_CHECKING:
    from segue.models.omni.qwen2_5_omni.reference import Reference, Reply

PROMPTS = [
    "Describe the image.",
    "Hello, how are you today?",
    "Tell me a short story about the sea.",
    "What is the best cup of tea?",
    "Count from one to ten.",
    "Where are you going?",
    "What does the word mean?",
    "Write a list of things on a beach.",
    "Who is speaking?",
    "Good night.",
]


@pytest.fixture(scope="module")
def replies(reference: Reference) -> list[Reply]:
    return [reference.generate(reference.inputs(text), max_tokens=150, max_codes=400, noise_seed=1) for text in PROMPTS]


def test_layout_is_the_published_one(tiny_dir: Path) -> None:
    names = {path.name for path in tiny_dir.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "chat_template.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "spk_dict.pt",
        "model.safetensors.index.json",
    }
    config = json.loads((tiny_dir / "config.json").read_text())
    assert config["architectures"] == ["Qwen2_5OmniForConditionalGeneration"]
    weight_map = json.loads((tiny_dir / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) >= 2
    for name, shard in weight_map.items():
        with safe_open(tiny_dir / shard, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 — not a dict
    assert {".".join(name.split(".")[:2]) for name in weight_map} == {
        "thinker.audio_tower",
        "thinker.visual",
        "thinker.model",
        "thinker.lm_head",
        "talker.model",
        "talker.thinker_to_talker_proj",
        "talker.codec_head",
        "token2wav.code2wav_dit_model",
        "token2wav.code2wav_bigvgan_model",
    }


def test_every_weight_of_the_model_is_there(tiny_dir: Path, reference: Reference) -> None:
    stored = json.loads((tiny_dir / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(stored) == len(reference.model.state_dict())
    expected = shapes_of(json.loads((tiny_dir / "config.json").read_text()))
    assert set(stored) == set(expected)


def test_ids_of_config_and_tokenizer_agree(tiny_dir: Path, reference: Reference) -> None:
    tokenizer, config = reference.processor.tokenizer, reference.model.config.thinker_config
    for token, index in {
        "<|AUDIO|>": config.audio_token_id,
        "<|IMAGE|>": config.image_token_id,
        "<|VIDEO|>": config.video_token_id,
        "<|audio_bos|>": config.audio_start_token_id,
        "<|audio_eos|>": config.audio_end_token_id,
        "<|vision_bos|>": config.vision_start_token_id,
        "<|vision_eos|>": config.vision_end_token_id,
        "<|im_end|>": reference.model.thinker.generation_config.eos_token_id,
    }.items():
        assert tokenizer.convert_tokens_to_ids(token) == index
    assert reference.processor.tokenizer.decode(tokenizer("Grüße, 世界!")["input_ids"]) == "Grüße, 世界!"
    speakers = torch.load(tiny_dir / "spk_dict.pt", weights_only=True)
    assert list(speakers) == ["Chelsie", "Ethan"]
    for speaker in speakers.values():
        assert speaker["cond"].shape == (1, 192)
        assert speaker["ref_mel"].shape[::2] == (1, 80)
        assert len(tokenizer) <= speaker["bos_token"] < config.text_config.vocab_size


def test_same_seed_same_files(tiny_dir: Path, tmp_path: Path) -> None:
    def digests(directory: Path) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.safetensors")}

    tiny.make(tmp_path / "again")
    tiny.make(tmp_path / "other", seed=1)
    assert digests(tmp_path / "again") == digests(tiny_dir)
    assert all(digests(tmp_path / "other")[name] != digest for name, digest in digests(tiny_dir).items())


def test_unknown_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'tiny'"):
        tiny.make(tmp_path, "tinny")


def test_small_is_frozen() -> None:
    config = config_json(SHAPES["small"])
    thinker, talker = config["thinker_config"]["text_config"], config["talker_config"]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [thinker[name] for name in names] == [768, 16, 12, 2, 2112]
    assert [talker[name] for name in (*names, "head_dim")] == [512, 12, 8, 2, 1408, 64]
    dit, bigvgan = config["token2wav_config"]["dit_config"], config["token2wav_config"]["bigvgan_config"]
    assert [dit[name] for name in names[:3]] == [128, 4, 2]
    assert bigvgan["upsample_initial_channel"] == 128
    for encoder, hidden, depth in (
        ("audio_config", "d_model", "encoder_layers"),
        ("vision_config", "hidden_size", "depth"),
    ):
        assert config["thinker_config"][encoder][hidden] == 256
        assert config["thinker_config"][encoder][depth] == 2
    for shape in SHAPES.values():
        flow = config_json(shape)["token2wav_config"]["dit_config"]
        assert flow["block_size"] == 24
        assert max(*flow["look_ahead_layers"], *flow["look_backward_layers"]) < flow["num_hidden_layers"]
    parameters = sum(shape.numel() for shape in shapes_of(config).values())
    assert 140e6 < parameters < 170e6


@pytest.mark.nightly
def test_replies_differ_and_end_by_themselves(replies: list[Reply], reference: Reference) -> None:
    end = reference.model.thinker.generation_config.eos_token_id
    assert len({tuple(reply.token_ids) for reply in replies}) == len(PROMPTS)
    assert len({len(reply.token_ids) for reply in replies}) >= 6
    assert sum(reply.token_ids[-1] == end for reply in replies) >= 8
    assert np.mean([len(set(reply.token_ids)) / len(reply.token_ids) for reply in replies]) > 0.7  # no loops


@pytest.mark.nightly  # test_truth_requests hears where it ends
def test_speech_differs_and_ends_by_itself(replies: list[Reply]) -> None:
    spoken = [reply for reply in replies if reply.codes]
    assert len(spoken) >= 8
    assert len({tuple(reply.codes) for reply in spoken}) == len(spoken)
    assert len({len(reply.codes) for reply in spoken}) >= 6
    assert sum(reply.speech_ended for reply in spoken) >= len(spoken) - 1
    assert np.mean([len(set(reply.codes)) / len(reply.codes) for reply in spoken]) > 0.4


def test_audio_is_audio(replies: list[Reply]) -> None:
    for reply in replies:
        if len(reply.codes) < 10:
            continue
        assert len(reply.samples) == len(reply.codes) * 480  # 24000 samples of 50 codes a second
        assert 0.02 < reply.samples.square().mean().sqrt() < 0.5
        assert reply.samples.mean().abs() < 0.01
        assert (reply.samples.abs() >= 1.0).float().mean() < 1e-3
        loudness = reply.samples.unfold(0, 480, 480).square().mean(-1).sqrt()
        assert loudness.std() > 0.05 * loudness.mean()


def test_media_change_the_reply(reference: Reference, assets: Path) -> None:
    photo = Image.open(assets / "photo.jpg")
    speech = decode_audio(MediaPart("audio", (assets / "speech.wav").read_bytes()), 16000, MediaLimits())
    frames = decode_video(MediaPart("video", (assets / "video.mp4").read_bytes()), 2.0, MediaLimits()).frames
    variants = {
        "image": [{"images": [photo]}, {"images": [photo.rotate(180)]}],
        "audio": [{"audio": [speech]}, {"audio": [speech[::-1].copy()]}],
        "video": [{"videos": [frames]}, {"videos": [frames[::-1].copy()]}],
    }
    for kind, (one, other) in variants.items():
        said = [
            reference.generate(reference.inputs("What is this?", kind, **media), speech=False).token_ids
            for media in (one, other)
        ]
        assert said[0] != said[1], kind


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the difference over that of the first."""
    return float((one - other).square().mean().sqrt() / one.square().mean().sqrt())


CODES = [(37 * index * index + 11) % 280 for index in range(60)]


def test_codes_noise_and_voice_are_heard(reference: Reference) -> None:
    audio = reference.vocode(CODES)
    assert torch.equal(audio, reference.vocode(CODES))
    assert distance(audio, reference.vocode(CODES[::-1])) > 0.1
    assert distance(audio, reference.vocode(CODES, noise_seed=1)) > 0.1
    assert distance(audio, reference.vocode(CODES, speaker="Ethan")) > 0.1


def test_blocks_of_the_flow_influence_each_other(reference: Reference) -> None:
    """A block (12 codes, 5760 samples) hears the one before and the one after it, and the next only faintly."""
    changed = [*CODES[:48], *CODES[:12]]  # the last of five blocks
    blocks = reference.vocode(CODES).unfold(0, 5760, 5760)
    others = reference.vocode(changed).unfold(0, 5760, 5760)
    apart = [distance(one, other) for one, other in zip(blocks, others, strict=True)]
    assert apart[4] > 0.1
    assert apart[3] > 1e-3
    assert apart[2] < 1e-2  # its edge, through the waveform network's convolutions
    assert apart[0] < 1e-4
    first = [*CODES[48:], *CODES[12:]]
    others = reference.vocode(first).unfold(0, 5760, 5760)
    assert distance(blocks[1], others[1]) > 1e-3


@contextmanager
def nudged(weight: torch.Tensor, *where: int) -> Iterator[None]:
    """One number of a weight, changed for a while."""
    before = weight.data[where].clone()
    weight.data[where] += 2.0
    yield
    weight.data[where] = before


def test_a_single_weight_changes_the_answer(reference: Reference, replies: list[Reply]) -> None:
    model, inputs = reference.model, reference.inputs(PROMPTS[2])
    layer = decoder_in(model.thinker).layers[0]
    options = {"max_tokens": 150, "max_codes": 400, "noise_seed": 1}
    assert reference.generate(inputs, **options).token_ids == replies[2].token_ids
    with nudged(layer.self_attn.o_proj.weight, 5, 7):
        assert reference.generate(inputs, **options).token_ids != replies[2].token_ids
    with nudged(model.talker.model.layers[1].self_attn.v_proj.weight, 3, 4):
        changed = reference.generate(inputs, **options)
    assert changed.token_ids == replies[2].token_ids
    assert changed.codes != replies[2].codes
    audio = reference.vocode(CODES)
    with nudged(model.token2wav.code2wav_dit_model.transformer_blocks[1].attn.to_v.weight, 3, 4):
        assert distance(audio, reference.vocode(CODES)) > 1e-3
