"""Images in: real files of every common kind, raw arrays, and everything that is wrong with them."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from media_breaking import broken
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from segue.media.image import decode_alpha, decode_image
from segue.media.limits import MediaLimits
from segue.messages.errors import ConfigError, InvalidRequest, TooLarge
from segue.messages.request import ArrayInfo, MediaPart

PHOTO = Path(__file__).parents[2] / "assets" / "photo.jpg"
LIMITS = MediaLimits()
FIELD = "messages[0].content[1]"


def part(data: bytes, array: ArrayInfo | None = None) -> MediaPart:
    return MediaPart("image", data, array=array, field=FIELD)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def small(mode: str = "RGB") -> Image.Image:
    return Image.open(PHOTO).resize((24, 16)).convert(mode)


def test_photo_is_what_pillow_reads() -> None:
    pixels = decode_image(part(PHOTO.read_bytes()), LIMITS)
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, np.asarray(Image.open(PHOTO).convert("RGB")))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("PNG", mode) for mode in ("RGB", "RGBA", "P", "L", "LA", "1")),
        *(("JPEG", mode) for mode in ("CMYK", "L")),
        *(("WEBP", "RGB"), ("BMP", "RGB"), ("TIFF", "CMYK"), ("GIF", "P")),
    ],
)
def test_every_mode_becomes_rgb(kind: str, mode: str) -> None:
    data = saved(small(mode), kind)
    pixels = decode_image(part(data), LIMITS)
    assert pixels.shape == (16, 24, 3)
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent(mode: str) -> None:
    alpha = np.zeros((16, 24), dtype=np.uint8)
    alpha[:, 12:] = 255
    image = small()
    image.putalpha(Image.fromarray(alpha))
    if mode == "P":
        image = image.quantize(16, method=Image.Quantize.FASTOCTREE)
    found = decode_alpha(part(saved(image.convert(mode), "PNG")), LIMITS)
    assert np.array_equal(found == 0, alpha == 0)


@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_files_without_transparency_are_refused(mode: str) -> None:
    with pytest.raises(InvalidRequest, match="no alpha channel") as caught:
        decode_alpha(part(saved(small(mode), "PNG")), LIMITS)
    assert caught.value.field == FIELD


def test_a_broken_file_has_no_transparency_either() -> None:
    image = small()
    image.putalpha(0)
    with pytest.raises(InvalidRequest, match="not a readable image"):
        decode_alpha(part(saved(image, "PNG")[:-60]), LIMITS)


def test_sixteen_bit_grey_keeps_its_brightness() -> None:
    grey = np.arange(16 * 24, dtype=np.uint16).reshape(16, 24) * 170
    pixels = decode_image(part(saved(Image.fromarray(grey), "PNG")), LIMITS)
    assert np.array_equal(pixels[:, :, 0], grey >> 8)


def test_rotation_of_the_camera_is_undone() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter to the right
    data = saved(small(), "PNG", exif=exif)
    assert np.array_equal(decode_image(part(data), LIMITS), np.rot90(np.asarray(small()), -1))


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decode_image(part(data), LIMITS) == [255, 0, 0]).all()


@pytest.mark.parametrize("shape", [(16, 24, 3), (16, 24, 4), (16, 24, 1), (16, 24)])
def test_raw_arrays(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int64).astype(np.uint8).reshape(shape)
    pixels = decode_image(part(array.tobytes(), ArrayInfo("uint8", shape)), LIMITS)
    assert pixels.shape == (16, 24, 3)
    assert np.array_equal(pixels[..., 0], array if array.ndim == 2 else array[..., 0])


@pytest.mark.parametrize(
    ("info", "says"),
    [
        (ArrayInfo("float32", (2, 2, 3)), "must be uint8 (height, width, 3)"),
        (ArrayInfo("uint8", (4, 6, 2)), "must be uint8 (height, width, 3)"),
        (ArrayInfo("uint8", (5, 5, 3)), "needs 75 bytes, but 48 came"),
        (ArrayInfo("uint8", (-4, -4, 3)), "negative"),
        (ArrayInfo("object", (4, 4, 3)), "holds no samples"),
        (ArrayInfo("colour", (4, 4, 3)), "not known"),
        (ArrayInfo("uint8", (0, 4, 3)), "0 bytes"),
    ],
)
def test_wrong_arrays_are_named(info: ArrayInfo, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_image(part(bytes(48), info), LIMITS)
    assert says in caught.value.message
    assert caught.value.field == FIELD


def test_an_array_without_pixels_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        decode_image(part(b"", ArrayInfo("uint8", (0, 4, 3))), LIMITS)


@pytest.mark.parametrize(
    "data",
    [b"", b"no image at all", PHOTO.read_bytes()[:3000], (PHOTO.parent / "speech.wav").read_bytes()],
    ids=["empty", "text", "cut off", "sound"],
)
def test_broken_files_are_named(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"send e\.g\. JPEG") as caught:
        decode_image(part(data), LIMITS)
    assert FIELD in caught.value.message
    assert not isinstance(caught.value, TooLarge)


def test_limits_name_themselves() -> None:
    with pytest.raises(TooLarge, match=r"at most 12345678 \(max_image_pixels\)"):
        decode_image(part(saved(Image.new("1", (4000, 4000)), "PNG")), MediaLimits(max_image_pixels=12_345_678))
    with pytest.raises(TooLarge, match="max_media_bytes"):
        decode_image(part(PHOTO.read_bytes()), MediaLimits(max_bytes=1000))
    with pytest.raises(InvalidRequest, match="max_media_parts"):
        LIMITS.check_items(65, "messages")


@pytest.mark.parametrize("side", [10_000, 15_000])
def test_a_bomb_is_refused_before_it_is_unpacked(side: int) -> None:
    bomb = saved(Image.new("1", (side, side)), "PNG")
    with pytest.raises(TooLarge, match="max_image_pixels"):
        decode_image(part(bomb), LIMITS)


def directory(*entries: tuple[int, int, int, int]) -> bytes:
    """A little-endian TIFF directory of (tag, type, numbers, value or offset)."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)


OVERLAPPING = directory(*((tag, 7, 4000, 8) for tag in range(1, 1000))) + bytes(4000)
"""Entries that all point at the same bytes: Pillow would copy 4 MB of 16 KB, and terabytes of 64 MB."""
MANY_STRIPS = directory((256, 4, 1, 1), (257, 4, 1, 1), (273, 4, 1 << 21, 8), (279, 4, 1 << 21, 8)) + bytes(20 << 20)


def progressive(scans: int) -> bytes:
    """A JPEG whose last scan stands there many times over."""
    file = saved(Image.new("L", (8000, 8000)), "JPEG", progressive=True)
    last = file.rindex(b"\xff\xda")
    return file[:-2] + file[last:-2] * scans + file[-2:]


def noted(size: int) -> bytes:
    """A PNG with a compressed text of so many bytes."""
    text = PngInfo()
    text.add_text("note", "x" * size, zip=True)
    return saved(small(), "PNG", pnginfo=text)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (OVERLAPPING, "larger than the file"),
        (saved(small(), "PNG", exif=b"Exif\0\0" + OVERLAPPING), "larger than the file"),
        (saved(small(), "WEBP", exif=b"Exif\0\0" + OVERLAPPING), "larger than the file"),
        (MANY_STRIPS, "2097152 numbers"),
        (progressive(400), "scans"),
        (noted(50_000_000), "too large"),
    ],
    ids=["directory", "exif of png", "exif of webp", "strips", "scans", "text"],
)
def test_what_would_unpack_to_much_is_refused_unread(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        decode_image(part(data), LIMITS)


def test_the_media_of_a_request_share_a_budget() -> None:
    limits = MediaLimits(max_request_pixels=1000)
    one = part(saved(small(), "PNG"))  # 384 pixels
    for _ in range(4):  # not counted before the first request
        decode_image(one, limits)
    limits.budget.begin()
    decode_image(one, limits)
    decode_image(one, limits)
    with pytest.raises(TooLarge, match="max_request_pixels"):
        decode_image(one, limits)
    limits.budget.begin()
    assert decode_image(one, limits).shape == (16, 24, 3)


def test_limits_of_a_deployment() -> None:
    assert MediaLimits.from_options({"max_items": 3, "max_audio_seconds": 2}).max_items == 3
    with pytest.raises(ConfigError, match="did you mean 'max_image_pixels'"):
        MediaLimits.from_options({"max_image_pixel": 3})
    for bad in (0, -1, "3", 1.5, True):
        with pytest.raises(ConfigError, match=r"limits\.max_items"):
            MediaLimits.from_options({"max_items": bad})


FILES = [
    saved(small(), kind)
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA")
]


def test_a_broken_avif() -> None:
    """Its plugin raises an error of its own."""
    data = saved(small(), "AVIF")
    head = data.index(b"mdat") + 4
    with pytest.raises(InvalidRequest, match="not a readable image file"):
        decode_image(part(data[:head] + bytes(len(data) - head)), LIMITS)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(broken(FILES))
def test_no_file_crashes_it(data: bytes) -> None:
    try:
        pixels = decode_image(part(data), MediaLimits(max_image_pixels=100_000))  # so that each takes milliseconds
    except InvalidRequest:
        return
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
