"""The audio tokenizer: its codes, and samples whole and in chunks, are those of the published code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mimo_audio_family import EMPTY, EVERY, LAST, cases, context, drawn_codes, golden, recording, stage_request, wave_of

from segue.engines.module.engine import ModuleConfig, ModuleEngine
from segue.messages.errors import ConfigError, StageFailed
from segue.models.speech.mimo_audio.config import frames_of, read_codec, read_config
from segue.models.speech.mimo_audio.encoder import RecordingEncoder
from segue.models.speech.mimo_audio.vocoder import Vocoder

WITHIN = 1e-5
SAMPLES = 960
"""Per frame."""
GROUP = 4
SILENT = [32, 32, *[16] * 6] * GROUP
SPOKEN = [case for case in cases().values() if case.samples is not None]


@pytest.fixture(scope="module")
def vocoder(tiny_dir: Path) -> Vocoder:
    return Vocoder(context(tiny_dir, "vocoder"))


def patches(frames: int) -> list[list[int]]:
    """The codes of `streamed.FRAMES`."""
    return drawn_codes(frames).reshape(-1, GROUP * 8).tolist()


@pytest.mark.parametrize("samples", [int(name.partition(".")[2]) for name in golden() if name.startswith("encoded.")])
def test_recordings_have_the_published_codes(tiny_dir: Path, samples: int) -> None:
    """The longest is of two segments, whose second ends oddly in both strides."""
    encoder = RecordingEncoder(context(tiny_dir, "encoder", options={"cache_bytes": 0}))
    item = {"hash": b"", "samples": torch.from_numpy(recording(samples))}
    [work] = encoder.feed("r", "input", {"media": [item]}, final=True)
    [result] = encoder.run([work])
    assert result.payload is not None
    [coded] = result.payload["media"]
    frames = coded["codes"].reshape(-1, 8)
    assert torch.equal(frames[-LAST:].T, golden()[f"encoded.{samples}"].long())
    config = read_config(tiny_dir)
    assert len(coded["codes"]) == -(-frames_of(samples, read_codec(tiny_dir, config)) // GROUP)


def test_recordings_differ() -> None:
    assert all(len(channel.unique()) > 5 for channel in golden()["encoded.30000"])


@pytest.mark.parametrize("frames", [int(name.partition(".")[2]) for name in golden() if name.startswith("decoded.")])
def test_one_call_gives_the_published_samples(vocoder: Vocoder, frames: int) -> None:
    [wave] = vocoder.decoder.net(drawn_codes(frames)[None])
    assert len(wave) == SAMPLES * frames
    torch.testing.assert_close(wave[::EVERY], golden()[f"decoded.{frames}"], atol=WITHIN, rtol=0)
    assert 0.02 < float(wave.square().mean().sqrt()) < 0.5


@pytest.mark.parametrize("frames", [328, 96, 28])
def test_pieces_are_the_published_chunks(vocoder: Vocoder, frames: int) -> None:
    wave = wave_of(vocoder, patches(frames))
    assert len(wave) == SAMPLES * frames
    torch.testing.assert_close(wave[::EVERY], golden()[f"streamed.{frames}"], atol=WITHIN, rtol=0)


@pytest.mark.parametrize("case", SPOKEN, ids=lambda case: case.name)
def test_replies_of_one_piece_have_the_published_samples(vocoder: Vocoder, case: object) -> None:
    """Rows of text among the patches are no frames."""
    wave = wave_of(vocoder, [row[1:] for row in case.rows], [3, 1, 1])
    if len(case.frames) <= 48:
        torch.testing.assert_close(wave[::EVERY], case.samples, atol=WITHIN, rtol=0)
    assert len(wave) == SAMPLES * len(case.frames)


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.booleans(), min_size=1, max_size=30))
def test_the_split_changes_no_sample(vocoder: Vocoder, sizes: list[int], speaks: list[bool]) -> None:
    codes = iter(patches(120))
    rows = [next(codes) if speech else SILENT for speech in speaks]
    assert torch.equal(wave_of(vocoder, rows, sizes), wave_of(vocoder, rows))


def test_in_a_batch_of_utterances_at_different_places(vocoder: Vocoder) -> None:
    """Each joins when the one before it is some patches ahead; each has its own norm."""
    asked = {str(length): patches(328)[place : place + length] for place, length in ((0, 40), (20, 31), (7, 55))}
    engine = ModuleEngine(vocoder, ModuleConfig(max_batch=4))
    samples: dict[str, list[torch.Tensor]] = {}
    at = dict.fromkeys(asked, 0)
    turn = 0
    while any(at[name] < len(rows) for name, rows in asked.items()) or engine.has_work():
        for index, (name, rows) in enumerate(asked.items()):
            if turn < 2 * index or at[name] == len(rows):
                continue
            if name not in samples:
                samples[name] = []
                engine.add(stage_request("vocoder", name))
            stop = min(at[name] + 5, len(rows))
            payload = {"codes": torch.tensor(rows[at[name] : stop]), "start": at[name]}
            engine.feed(name, "llm", payload, final=stop == len(rows))
            at[name] = stop
        for output in engine.step():
            assert output.error is None
            assert output.payload is not None
            assert output.payload["start"] == sum(map(len, samples[output.request_id]))
            samples[output.request_id].append(output.payload["samples"])
        turn += 1
    assert engine.stats()["calls_total"] < sum(map(len, samples.values()))
    for name, rows in asked.items():
        torch.testing.assert_close(torch.cat(samples[name]), wave_of(vocoder, rows), atol=WITHIN, rtol=0)


@pytest.mark.parametrize(
    "part", ["quantizer", "dconv1.norm", "layers.2.self_attn", "dconv2.conv", "vocoder.layers.2.fc2", "vocoder.out"]
)
def test_every_part_counts(tiny_dir: Path, part: str) -> None:
    """One part of the network gives other than it should: the samples are others."""
    spoilt = Vocoder(context(tiny_dir, "vocoder"))
    for book in spoilt.decoder.net.quantizer.books if part == "quantizer" else ():
        book.embed.mul_(1.2).add_(0.1)
    spoilt.decoder.net.get_submodule(part).register_forward_hook(lambda module, given, out: 1.5 * out.roll(1, -1))
    wave = spoilt.decoder.net(drawn_codes(60)[None])[0, ::EVERY]
    assert float((wave - golden()["decoded.60"]).abs().max()) > 1e-3


def test_fewer_frames_ahead_come_earlier_and_differ(tiny_dir: Path, vocoder: Vocoder) -> None:
    """The error falls with the look-ahead."""
    whole = wave_of(vocoder, patches(96))
    errors = {}
    for ahead in (0, 8, 24, 40):
        wave = wave_of(Vocoder(context(tiny_dir, "vocoder", options={"right_frames": ahead})), patches(96))
        errors[ahead] = float((wave - whole).square().mean().sqrt() / whole.square().mean().sqrt())
    assert errors[40] == 0.0
    assert 1.0 > errors[0] > errors[8] > errors[24] > 0.0


def test_an_utterance_without_a_frame_has_no_samples(vocoder: Vocoder) -> None:
    assert len(wave_of(vocoder, [])) == len(wave_of(vocoder, [SILENT])) == 0


def test_wrong_codes_and_options_are_named(tiny_dir: Path, vocoder: Vocoder) -> None:
    rows = [[*patches(4)[0][:-1], 16]]
    assert EMPTY not in rows[0]
    with pytest.raises(StageFailed, match="code 16 of channel 7 is outside its codebook, which has codes 0 to 15"):
        wave_of(vocoder, rows)
    with pytest.raises(ConfigError, match="right_frames is 41; it must be from 0 to 40"):
        Vocoder(context(tiny_dir, "vocoder", options={"right_frames": 41}))
    with pytest.raises(ConfigError, match="the vocoder has no option 'right_frame'"):
        Vocoder(context(tiny_dir, "vocoder", options={"right_frame": 4}))
