"""A client's file depends on the samples alone, not on how they come; parts that are joined are one file."""

from __future__ import annotations

import io
import itertools

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.media.audio_file import AudioFile
from segue.messages.formats import AUDIO_FORMATS, Format

RATE = 24000
SAMPLES = np.sin(np.arange(20000) ** 1.3 / 40).astype(np.float32) / 3


def made(form: Format, pieces: list[np.ndarray], rate: int = RATE) -> bytes:
    file = AudioFile(form, rate)
    return b"".join(file.feed(piece) for piece in pieces) + file.finish()


@pytest.mark.parametrize("name", AUDIO_FORMATS)
@settings(max_examples=20)
@given(
    cuts=st.lists(st.integers(0, len(SAMPLES)), max_size=8).map(sorted),
    asked=st.sampled_from(
        [{}, {"whole": True}, {"part": 1}, {"speed": 1.25, "rate": 24000}, {"speed": 0.3, "rate": 16000}]
    ),
    rate=st.sampled_from([RATE, 22050, 7000]),
)
def test_the_bytes_do_not_depend_on_the_pieces(name: str, cuts: list[int], asked: dict[str, float], rate: int) -> None:
    form = Format(name=name, **asked)  # type: ignore[arg-type]
    pieces = [SAMPLES[start:end] for start, end in itertools.pairwise([0, *cuts, len(SAMPLES)])]
    assert made(form, pieces, rate) == made(form, [SAMPLES], rate)


@pytest.mark.parametrize("name", AUDIO_FORMATS)
def test_joined_parts_are_one_file(name: str) -> None:
    parts = [SAMPLES[:9001], SAMPLES[9001:17000], SAMPLES[17000:]]
    data = b"".join(made(Format(name=name, part=number), [part]) for number, part in enumerate(parts))
    if name in ("wav", "pcm16"):
        assert data == made(Format(name=name), [SAMPLES])
        return
    with av.open(io.BytesIO(data)) as container:
        rate = container.streams.audio[0].rate
        decoded = np.concatenate([frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)])
    if name == "flac":
        np.testing.assert_array_equal(decoded, np.rint(SAMPLES * 32767).astype("<i2"))
    else:
        assert len(SAMPLES) / RATE <= len(decoded) / rate < len(SAMPLES) / RATE + 0.1 * len(parts)
