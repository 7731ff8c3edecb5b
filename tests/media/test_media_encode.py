"""Encoded audio decodes to what went in: same length, same loudness, whole and in pieces."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from segue.media.encode import audio_encoder, encode_audio, encode_image, pcm16
from segue.messages.errors import InvalidRequest
from segue.messages.formats import AUDIO_FORMATS

CODECS = sorted(set(AUDIO_FORMATS) - {"pcm16"})


def tone(seconds: float, rate: int) -> np.ndarray:
    t = np.arange(int(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * 440 * t)).astype(np.float32)


def decode(data: bytes) -> tuple[np.ndarray, int]:
    """Float samples and rate of a file."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        pieces = [out.to_ndarray()[0] for frame in container.decode(stream) for out in resampler.resample(frame)]
        pieces += [out.to_ndarray()[0] for out in resampler.resample(None)]
        return (np.concatenate(pieces) if pieces else np.empty(0, np.float32)), stream.rate


def stream_encode(samples: np.ndarray, rate: int, name: str, piece: int) -> list[bytes]:
    encoder = audio_encoder(name, rate)
    out = [encoder.feed(samples[i : i + piece]) for i in range(0, len(samples), piece)]
    return [*out, encoder.finish()]


@pytest.mark.parametrize("rate", [16000, 24000, 22050, 44100])
@pytest.mark.parametrize("name", CODECS)
def test_a_whole_file_has_the_length_and_loudness_of_its_samples(name: str, rate: int) -> None:
    samples = tone(1.5, rate)
    heard, heard_rate = decode(encode_audio(samples, rate, name))
    # ADTS has no place to say how much of its first and last frame (1024 each) is padding
    assert len(heard) / heard_rate == pytest.approx(1.5, abs=2048 / heard_rate if name == "aac" else 0.03)
    middle = heard[heard_rate // 4 : heard_rate]
    # LAME scales by 0.95 on purpose
    assert np.sqrt((middle**2).mean()) == pytest.approx(0.3 / np.sqrt(2), rel=0.07)


@pytest.mark.parametrize("name", CODECS)
def test_a_stream_has_the_length_and_loudness_of_its_samples_and_comes_early(name: str) -> None:
    samples = tone(2.0, 24000)
    pieces = stream_encode(samples, 24000, name, 4800)
    heard, rate = decode(b"".join(pieces))
    assert len(heard) / rate == pytest.approx(2.0, abs=0.12)
    middle = heard[rate // 2 : rate + rate // 2]
    # LAME scales by 0.95 on purpose
    assert np.sqrt((middle**2).mean()) == pytest.approx(0.3 / np.sqrt(2), rel=0.07)
    half = len(pieces) // 2
    assert sum(map(len, pieces[:half])) > 0.3 * sum(map(len, pieces)), "the first half of the audio was held back"


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_lossless_formats_keep_every_sample(name: str) -> None:
    rng = np.random.default_rng(0)
    samples = rng.uniform(-1, 1, 5000).astype(np.float32)
    wanted = np.frombuffer(pcm16(samples), "<i2").astype(np.float32) / 32768
    for data in (encode_audio(samples, 24000, name), b"".join(stream_encode(samples, 24000, name, 999))):
        heard, rate = decode(data)
        assert rate == 24000
        np.testing.assert_array_equal(heard, wanted)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-2, 2, width=32), max_size=20), max_size=6))
def test_pcm_in_pieces_is_pcm_whole(pieces: list[list[float]]) -> None:
    encoder = audio_encoder("pcm16", 24000)
    streamed = b"".join([*(encoder.feed(np.array(piece, np.float32)) for piece in pieces), encoder.finish()])
    whole = np.array([sample for piece in pieces for sample in piece], np.float32)
    assert streamed == encode_audio(whole, 24000, "pcm16")
    assert np.abs(np.frombuffer(streamed, "<i2") / 32767 - np.clip(whole, -1, 1)).max(initial=0) <= 0.51 / 32767


def test_samples_out_of_range_are_clipped_and_nan_is_silence() -> None:
    loud = np.array([2.0, -2.0, np.nan, np.inf, -np.inf], np.float32)
    assert np.frombuffer(pcm16(loud), "<i2").tolist() == [32767, -32767, 0, 32767, -32767]


@pytest.mark.parametrize("name", sorted(AUDIO_FORMATS))
def test_no_samples_at_all_is_not_an_error(name: str) -> None:
    empty = np.empty(0, np.float32)
    assert isinstance(encode_audio(empty, 24000, name), bytes)
    assert isinstance(b"".join(stream_encode(empty, 24000, name, 1)), bytes)


def test_an_unknown_format_is_refused_with_its_neighbour() -> None:
    with pytest.raises(InvalidRequest, match=r"audio.format is 'mp4'.*did you mean 'mp3'"):
        encode_audio(np.zeros(1, np.float32), 24000, "mp4")


def test_an_image_comes_back_pixel_by_pixel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    read = Image.open(io.BytesIO(encode_image(pixels.tobytes(), 5, 7, "png")))
    assert read.format == "PNG"
    np.testing.assert_array_equal(np.asarray(read), pixels)


def test_an_image_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="has 105 bytes, not 4"):
        encode_image(b"1234", 5, 7, "png")
