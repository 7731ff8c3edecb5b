"""Sound in: real files, raw samples, rates and channels, and everything that is wrong with them."""

from __future__ import annotations

import io
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from media_breaking import broken

from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.messages.errors import InvalidRequest, TooLarge
from segue.messages.request import ArrayInfo, MediaPart

ASSETS = Path(__file__).parents[2] / "assets"
SPEECH = (ASSETS / "speech.wav").read_bytes()
LIMITS = MediaLimits()
FIELD = "messages[0].content[0]"


def part(data: bytes, array: ArrayInfo | None = None) -> MediaPart:
    return MediaPart("audio", data, array=array, field=FIELD)


def raw(samples: np.ndarray, rate: float | None = None) -> MediaPart:
    return part(samples.tobytes(), ArrayInfo(str(samples.dtype), samples.shape, rate))


def encoded(samples: np.ndarray, rate: int, container: str, codec: str) -> bytes:
    """[channels, n] float32 → a file."""
    out = io.BytesIO()
    layout = "mono" if len(samples) == 1 else "stereo"
    with av.open(out, "w", format=container) as target:
        stream = target.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
        frame.sample_rate = rate
        shaper = av.AudioResampler(stream.format, layout, rate, frame_size=stream.codec_context.frame_size or 1024)
        for piece in [*shaper.resample(frame), *shaper.resample(None)]:
            target.mux(stream.encode(piece))
        target.mux(stream.encode(None))
    return out.getvalue()


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def test_speech_at_its_own_rate_is_bit_exact() -> None:
    samples = decode_audio(part(SPEECH), 48000, LIMITS)
    pcm = np.frombuffer(SPEECH[-2 * len(samples) :], np.int16)
    assert np.array_equal(samples, pcm.astype(np.float32) / 32768)


def test_speech_is_resampled() -> None:
    samples = decode_audio(part(SPEECH), 16000, LIMITS)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 68545 / 3) <= 32
    whole = decode_audio(part(SPEECH), 48000, LIMITS)
    assert samples.std() == pytest.approx(whole.std(), rel=0.02)


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [
        ("wav", "pcm_s16le", 44100),
        ("flac", "flac", 44100),
        ("ogg", "libopus", 48000),
        ("mp3", "libmp3lame", 44100),
        ("ipod", "aac", 44100),
    ],
)
def test_containers(container: str, codec: str, rate: int) -> None:
    samples = decode_audio(part(encoded(tone(1.0, rate)[None], rate, container, codec)), 16000, LIMITS)
    assert abs(len(samples) - 16000) < 2500  # lossy codecs pad
    middle = samples[4000:12000]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert spectrum.argmax() * 16000 / len(middle) == pytest.approx(440, abs=3)
    assert np.abs(middle).max() == pytest.approx(0.4, abs=0.03)


def test_channels_are_mixed() -> None:
    stereo = np.stack([tone(0.5, 16000), -tone(0.5, 16000)])
    samples = decode_audio(part(encoded(stereo, 16000, "wav", "pcm_s16le")), 16000, LIMITS)
    assert np.abs(samples).max() < 1e-3


def test_audio_of_a_video() -> None:
    samples = decode_audio(part((ASSETS / "video.mp4").read_bytes()), 16000, LIMITS)
    assert 1.9 < len(samples) / 16000 < 2.2


def test_raw_samples_are_taken_as_they_are() -> None:
    wave = tone(0.1, 16000)
    assert np.array_equal(decode_audio(raw(wave), 16000, LIMITS), wave)
    assert np.array_equal(decode_audio(raw(wave, 16000), 16000, LIMITS), wave)
    whole = np.array([-32768, 0, 16384], np.int16)
    assert decode_audio(raw(whole), 16000, LIMITS).tolist() == [-1.0, 0.0, 0.5]


def test_raw_samples_of_another_rate_are_resampled() -> None:
    samples = decode_audio(raw(tone(1.0, 24000), 24000), 16000, LIMITS)
    assert abs(len(samples) - 16000) <= 32
    assert np.abs(samples[1000:-1000] - tone(1.0, 16000)[1000 : len(samples) - 1000]).max() < 0.01


@pytest.mark.parametrize(
    ("samples", "rate", "says"),
    [
        (np.zeros((2, 8), np.float32), None, "must be float32 (samples,)"),
        (np.zeros(8, np.uint8), None, "must be float32 (samples,)"),
        (np.zeros(0, np.float32), None, "empty"),
        (np.array([0.0, np.nan], np.float32), None, "not numbers"),
        (np.zeros(8, np.float32), 0.5, "rate"),
        (np.zeros(8, np.float32), 44100.5, "rate"),
        (np.zeros(8, np.float32), float("nan"), "rate"),
    ],
)
def test_wrong_arrays_are_named(samples: np.ndarray, rate: float | None, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_audio(raw(samples, rate), 16000, LIMITS)
    assert says in caught.value.message
    assert caught.value.field == FIELD


@pytest.mark.parametrize("rate", [0, 1, 2_000_000_000])
def test_an_absurd_rate_costs_nothing(rate: int) -> None:
    """Four bytes of a header must not make a short file into hours of samples."""
    with pytest.raises(InvalidRequest, match=f"rate is {rate}|not a readable"):
        decode_audio(part(SPEECH[:24] + rate.to_bytes(4, "little") + SPEECH[28:]), 16000, LIMITS)


def test_a_track_may_change_its_rate_on_the_way() -> None:
    data = b"".join(encoded(tone(0.5, rate)[None], rate, "adts", "aac") for rate in (32000, 44100))
    samples = decode_audio(part(data), 16000, LIMITS)
    assert 0.9 < len(samples) / 16000 < 1.3


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    "data",
    [b"", b"no sound at all", SPEECH[:20], (ASSETS / "photo.jpg").read_bytes(), PLAYLIST, b"ffconcat version 1.0\n"],
    ids=["empty", "text", "cut off", "picture", "playlist", "script"],
)
def test_broken_files_are_named(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_audio(part(data), 16000, LIMITS)
    assert FIELD in caught.value.message
    assert not isinstance(caught.value, TooLarge)


def test_silent_file_without_samples_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no samples"):
        decode_audio(part(SPEECH[: SPEECH.index(b"data") + 8]), 16000, LIMITS)


def test_limits_name_themselves() -> None:
    with pytest.raises(TooLarge, match="max_audio_seconds"):
        decode_audio(part(SPEECH), 16000, MediaLimits(max_audio_seconds=1.0))
    with pytest.raises(TooLarge, match="max_audio_seconds"):
        decode_audio(raw(tone(2.0, 16000)), 16000, MediaLimits(max_audio_seconds=1.0))
    with pytest.raises(TooLarge, match="max_media_bytes"):
        decode_audio(part(SPEECH), 16000, MediaLimits(max_bytes=1000))


FILES = [
    encoded(tone(0.05, 16000)[None], 16000, container, codec)
    for container, codec in (("wav", "pcm_s16le"), ("flac", "flac"), ("ogg", "libopus"), ("mp3", "libmp3lame"))
]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(broken(FILES))
def test_no_file_crashes_it(data: bytes) -> None:
    try:
        samples = decode_audio(part(data), 16000, LIMITS)
    except InvalidRequest:
        return
    assert samples.dtype == np.float32
    assert np.isfinite(samples).all()
