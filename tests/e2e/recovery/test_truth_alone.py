"""Every kind of prompt through the whole system, one request at a time and many at once, is what transformers gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from truth_system import (
    BY_NAME,
    CASES,
    LONG,
    WITHIN,
    Case,
    System,
    Truth,
    assert_equals,
    assert_same,
    longer,
    spans,
)

from segue.messages.deltas import AudioDelta, Delta, Finished, TextDelta


@pytest.mark.parametrize("case", [*CASES, LONG], ids=lambda case: case.name)
def test_alone(system: System, truth: Truth, assets: Path, case: Case) -> None:
    [output] = system.ask(case.prompt(assets))
    truth.check(output, case)
    assert output.metrics.attempts == 1
    expected = {"input", "thinker", "talker", "vocoder"} | ({"encoder"} if case.kinds else set())
    assert spans(output) == expected


def test_the_answers_prove_something(truth: Truth) -> None:
    """Different prompts get different replies, and the sound is loud enough for its tolerance to mean anything."""
    replies = [truth.of(case) for case in [*CASES, LONG]]
    assert len({tuple(reply.token_ids) for reply in replies}) == len(replies)
    assert len({tuple(reply.codes) for reply in replies}) == len(replies)
    assert any(reply.speech_ended for reply in replies)
    for reply in replies:
        assert 0.02 < float(reply.samples.pow(2).mean().sqrt()) < 0.5


def test_eight_at_once(system: System, truth: Truth, assets: Path) -> None:
    cases = [*CASES, LONG, longer(BY_NAME["text"], voice="Ethan", seed=99)]
    outputs = system.ask(*(case.prompt(assets) for case in cases))
    for output, case in zip(outputs, cases, strict=True):
        truth.check(output, case)


def test_streamed_is_whole(system: System, truth: Truth, assets: Path) -> None:
    deltas: list[Delta] = []
    [whole] = system.ask(LONG.prompt(assets))
    streamed = system.run(system.collect(LONG.prompt(assets), deltas.append))
    texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
    sounds = [delta for delta in deltas if isinstance(delta, AudioDelta)]
    assert isinstance(deltas[-1], Finished)
    assert len(texts) > 10
    assert len(sounds) > 2
    assert "".join(delta.text for delta in texts) == whole.text
    assert [token for delta in texts for token in delta.token_ids] == whole.token_ids["thinker"]
    assert deltas[-1].token_ids == whole.token_ids
    assert whole.audio is not None
    assert np.concatenate([delta.array for delta in sounds]).shape == whole.audio.samples.shape
    assert_same(streamed, whole)
    truth.check(streamed, LONG)


def test_the_same_prompt_again_finds_its_prefix(system: System, truth: Truth, assets: Path) -> None:
    for name in ("text", "mixed"):
        case = BY_NAME[name]
        system.ask(case.prompt(assets))
        [again] = system.ask(case.prompt(assets))
        assert again.usage.cached_tokens > 0.8 * again.usage.prompt_tokens - 16
        truth.check(again, case)


def test_a_shared_prefix_is_found_and_the_rest_computed(system: System, truth: Truth, assets: Path) -> None:
    other = longer(BY_NAME["image"], text="What is it made of?", seed=21)
    system.ask(BY_NAME["image"].prompt(assets))
    [output] = system.ask(other.prompt(assets))
    assert 100 < output.usage.cached_tokens < output.usage.prompt_tokens - 1
    truth.check(output, other)


def test_a_prefix_that_a_text_only_request_left_behind_serves_the_talker(
    system: System, truth: Truth, assets: Path
) -> None:
    case = longer(BY_NAME["text"], text="Which words did nobody say before?", seed=22)
    system.ask(case.prompt(assets, modalities=["text"]))
    [output] = system.ask(case.prompt(assets))
    assert output.usage.cached_tokens > 0
    truth.check(output, case)


def test_text_only_touches_neither_talker_nor_vocoder(system: System, truth: Truth, assets: Path) -> None:
    for case in CASES:
        [output] = system.ask(case.prompt(assets, modalities=["text"]))
        assert output.token_ids == {"thinker": truth.of(case).token_ids}
        assert output.audio is None
        assert not spans(output) & {"talker", "vocoder"}


def test_audio_without_text(system: System, truth: Truth, assets: Path) -> None:
    case = BY_NAME["image"]
    [output] = system.ask(case.prompt(assets, modalities=["audio"]))
    [both] = system.ask(case.prompt(assets))
    assert (output.text, output.finish_reason) == ("", both.finish_reason)
    assert output.token_ids == both.token_ids
    output.text = both.text
    truth.check(output, case)


def test_identical_requests_with_other_seeds_differ_in_noise_alone(system: System, truth: Truth, assets: Path) -> None:
    cases = [longer(BY_NAME["text"], seed=seed) for seed in (1, 2, 3)]
    outputs = system.ask(*(case.prompt(assets) for case in cases))
    for output, case in zip(outputs, cases, strict=True):
        truth.check(output, case)
    assert len({output.audio.samples.tobytes() for output in outputs if output.audio is not None}) == 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"text": "write a few words about the sea and the hill behind it"}, "thinker's tokens"),
        ({"seed": 70}, "waveform"),
        ({"voice": "Ethan"}, "talker's codes"),
    ],
    ids=["text", "noise", "voice"],
)
def test_parity_fails_when_one_input_is_changed(
    system: System, truth: Truth, assets: Path, change: dict[str, object], what: str
) -> None:
    [output] = system.ask(longer(BY_NAME["text"], **change).prompt(assets))
    with pytest.raises(AssertionError, match=what):
        truth.check(output, BY_NAME["text"])


def test_another_image_of_the_same_size_gets_its_own_answer(system: System, truth: Truth, assets: Path) -> None:
    """Although the first one's prompt is in the prefix cache, and its rows in the encoder's."""
    case = BY_NAME["image"]
    pixels = np.asarray(Image.open(assets / "photo.jpg").convert("RGB")).copy()
    pixels[pixels.shape[0] // 2 :] = 255 - pixels[pixels.shape[0] // 2 :]
    prompt = case.prompt(assets)
    prompt["messages"][0]["content"][0] = {"type": "image", "image": pixels}
    _, output = system.ask(case.prompt(assets), prompt)
    with pytest.raises(AssertionError, match=r"thinker's tokens|talker's codes"):
        truth.check(output, case)
    inputs = truth.reference.inputs(case.text, "image", images=[Image.fromarray(pixels)])
    reply = truth.reference.generate(inputs, max_tokens=case.tokens, max_codes=case.codes, noise_seed=case.seed)
    assert_equals(output, reply, truth.reference, within=WITHIN[1])


@pytest.mark.parametrize(
    ("weight", "case", "what"),
    [
        ("language_model.layers.0.mlp.down_proj.weight", "text", "thinker's tokens|talker's codes"),
        pytest.param(
            "visual.blocks.0.mlp.down_proj.weight",
            "image",
            "thinker's tokens|talker's codes",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "audio_tower.layers.0.fc2.weight", "audio", "thinker's tokens|talker's codes", marks=pytest.mark.nightly
        ),
        ("talker.model.layers.0.mlp.down_proj.weight", "text", "talker's codes"),
        pytest.param(
            "token2wav.code2wav_dit_model.transformer_blocks.1.attn.to_k.weight",
            "text",
            "waveform",
            marks=pytest.mark.nightly,
        ),
        ("token2wav.code2wav_bigvgan_model.conv_pre.weight", "text", "waveform"),
    ],
)
def test_parity_fails_when_a_single_weight_is_changed(
    system: System, truth: Truth, assets: Path, weight: str, case: str, what: str
) -> None:
    [output] = system.ask(BY_NAME[case].prompt(assets))
    # the library's versions differ in where they put the thinker's parts
    [parameter] = [one for name, one in truth.reference.model.named_parameters() if name.endswith(weight)]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.view(-1)[1] += 2.0
        try:
            changed = truth.fresh(BY_NAME[case])
        finally:
            parameter.copy_(kept)
    with pytest.raises(AssertionError, match=what):
        assert_equals(output, changed, truth.reference, within=WITHIN[1])
    truth.check(output, BY_NAME[case])
