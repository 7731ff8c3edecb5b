"""A client's files depend on the units alone: not on how they come in parts, nor on parts that come twice."""

from __future__ import annotations

import base64
import io
import itertools
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from segue.media.audio_file import AudioFile
from segue.media.files import BASE64_BYTES, FileSet
from segue.messages.deltas import EncodedDelta, after
from segue.messages.formats import AUDIO_FORMATS, IMAGE_FORMATS, Format

FORMATS = {
    "audio": Format(name="flac"),
    "image": Format(name="webp", quality=80),
    "video": Format(name="mp4", poster=True),
}
RAMP = np.arange(20, dtype=np.uint8)[:, None, None, None] * np.ones((20, 16, 24, 3), np.uint8) * 9
UNITS: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "audio": (np.sin(np.arange(6000) / 20).astype(np.float32), {"sample_rate": 24000}),
    "preview": (RAMP[:3], {"tokens": 0}),
    "image": (RAMP[5:6], {"tokens": 4}),
    "video": (RAMP, {"fps": 8.0}),
}


def made(pieces: list[tuple[str, int, int]], formats: dict[str, Format] = FORMATS) -> list[EncodedDelta]:
    """What comes of the units (kind, start, end) in this order, and of the end."""
    files = FileSet(formats)
    deltas: list[EncodedDelta] = []
    for kind, start, end in pieces:
        data, others = UNITS[kind]
        part = {"kind": kind, "output": 0, "start": start, "data": data[start:end], **others}
        for one in files.split(files.fresh("maker", part)):
            deltas += files.feed("maker", one)
    deltas += files.finish(["maker"])
    files.close()
    return deltas


def contents(deltas: list[EncodedDelta]) -> dict[str, bytes]:
    """The bytes of each kind, every delta where the one before has ended."""
    whole: dict[str, bytes] = {}
    ends: dict[str, int] = {}
    for delta in deltas:
        assert delta.start == ends.get(delta.kind, 0)
        ends[delta.kind] = delta.end
        whole[delta.kind] = whole.get(delta.kind, b"") + delta.data
    return whole


WHOLE = contents(made([(kind, 0, len(data)) for kind, (data, _) in UNITS.items()]))


@given(data=st.data())
def test_the_bytes_do_not_depend_on_the_parts(data: st.DataObject) -> None:
    """Any cuts, and a part of a second attempt that begins anew after any of them."""
    pieces: list[tuple[str, int, int]] = []
    for kind, (units, _) in UNITS.items():
        cuts = sorted(data.draw(st.lists(st.integers(0, len(units)), max_size=3)))
        spans = list(itertools.pairwise([0, *cuts, len(units)]))
        again = data.draw(st.integers(0, len(spans)))
        restarted = [(0, spans[again - 1][1])] if again else []
        pieces += [(kind, *span) for span in (*spans[:again], *restarted, *spans[again:])]
    assert contents(made(pieces)) == WHOLE


@pytest.mark.parametrize("name", AUDIO_FORMATS)
@given(data=st.data())
def test_pieces_of_base64_decode_by_themselves(name: str, data: st.DataObject) -> None:
    """Joined, they are the base64 text of the file. A client that lost its output worker gets the rest of it in pieces
    of other borders."""
    samples = UNITS["audio"][0]
    file = AudioFile(Format(name=name), 24_000)
    expected = file.feed(samples) + file.finish()
    cuts = sorted({0, len(samples), *data.draw(st.lists(st.integers(0, len(samples)), max_size=6))})
    files = FileSet({"audio": Format(name=name, base64=True)})
    deltas: list[EncodedDelta] = []
    for start, end in itertools.pairwise(cuts):
        part = {"kind": "audio", "output": 0, "start": start, "data": samples[start:end], "sample_rate": 24_000}
        deltas += files.feed("maker", part)
    deltas += files.finish(["maker"])
    assert b"".join(delta.data for delta in deltas) == base64.b64encode(expected)
    have = data.draw(st.sampled_from(deltas)).start
    cut = 8 * data.draw(st.integers(0, have // 8))
    rest = [new for delta in deltas if (new := after(delta, cut)) is not None]
    pieces = [base64.b64decode(delta.data, validate=True) for delta in rest]
    assert b"".join(pieces) == expected[cut // 8 * 6 :]
    assert all(len(piece) % BASE64_BYTES == 0 for piece in pieces[:-1])


@given(have=st.integers(0, 20_000), kind=st.sampled_from(sorted(UNITS)))
def test_what_a_client_has_is_not_sent_again(have: int, kind: str) -> None:
    deltas = [delta for delta in made([(kind, 0, len(UNITS[kind][0]))]) if delta.kind == kind]
    end = deltas[-1].end
    rest = [new for delta in deltas if (new := after(delta, have)) is not None]
    assert sum(len(delta.data) + delta.last for delta in rest) == max(0, end - have)
    if have < end:
        assert (rest[0].start, rest[-1].last) == (have, True)


def test_videos_and_their_posters() -> None:
    with av.open(io.BytesIO(WHOLE["video"])) as container:
        assert (sum(1 for _ in container.decode(video=0)), container.streams.video[0].average_rate) == (20, 8)
    assert WHOLE["video"].index(b"moov") < WHOLE["video"].index(b"mdat"), (
        "players begin before they have the whole file"
    )
    assert Image.open(io.BytesIO(WHOLE["poster"])).size == (24, 16)
    deltas = {delta.kind: delta for delta in made([("video", 0, 20)])}
    assert deltas["video"].facts == {"height": 16, "width": 24, "fps": 8.0, "frames": 20}


@pytest.mark.parametrize("in_base64", [pytest.param(False, marks=pytest.mark.nightly), True])
@given(cuts=st.lists(st.integers(0, 20), max_size=3), again=st.integers(0, 20))
def test_fragments_are_sent_frame_by_frame(in_base64: bool, cuts: list[int], again: int) -> None:
    """Each frame can be shown when its bytes are there, and no byte depends on the parts, nor on a second attempt. In
    base64, each piece decodes by itself."""
    formats = {"video": Format(name="mp4", fragmented=True, base64=in_base64)}
    spans = list(itertools.pairwise([0, *sorted(cuts), 20]))
    spans += [(0, again)] if again else []
    deltas = made([("video", *span) for span in spans], formats)
    one_by_one = made([("video", frame, frame + 1) for frame in range(20)], formats)
    assert contents(deltas) == contents(one_by_one)
    assert [delta.facts["frames"] for delta in one_by_one] == [*range(1, 21), 20]
    assert (one_by_one[-1].data, one_by_one[-1].last) == (b"", True)
    pieces = [base64.b64decode(one.data, validate=True) if in_base64 else one.data for one in one_by_one]
    for frames in (1, 7, 20):
        with av.open(io.BytesIO(b"".join(pieces[:frames]))) as container:
            shown = [frame.to_ndarray(format="rgb24").mean() for frame in container.decode(video=0)]
            assert container.streams.video[0].average_rate == 8
        np.testing.assert_allclose(shown, RAMP[:frames].mean((1, 2, 3)), atol=3)


@pytest.mark.parametrize("name", IMAGE_FORMATS)
def test_images_are_what_they_are_called(name: str) -> None:
    files = FileSet({"image": Format(name=name)})
    [delta] = files.feed("maker", {"kind": "image", "output": 2, "start": 0, "data": RAMP[5:6], "tokens": 4})
    image = Image.open(io.BytesIO(delta.data))
    assert (image.format, image.size) == (name.upper(), (24, 16))
    assert (delta.index, delta.mime, delta.last) == (2, IMAGE_FORMATS[name], True)
    assert delta.facts == {"height": 16, "width": 24, "tokens": 4}
    assert np.abs(np.asarray(image).astype(int) - RAMP[5]).max() <= 2
