"""Turn a Python caller's in-memory images, samples and frames into raw-array `MediaPart`s, and prompt embeddings into
the bytes of a safetensors file, which only the input stage reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import safetensors.numpy
from PIL import Image, ImageOps

from segue.messages.errors import InvalidRequest, shown, wrong
from segue.messages.request import ArrayInfo, MediaPart
from segue.messages.tensors import tensor_part

EMBEDS = "prompt_embeds"
"""Clients' name for prompt embeddings."""


def called(field: str) -> str:
    """Return the name of an embeddings field for error messages."""
    return field if field == EMBEDS else f"{field} ({EMBEDS})"


def embeds_file(embeds: Any, field: str = EMBEDS) -> bytes:
    """Save a tensor or array [tokens, hidden] as safetensors; bytes are already a file. Raises `InvalidRequest`."""
    if isinstance(embeds, bytes):
        return embeds
    try:
        array = np.asarray(embeds)  # also of a torch tensor, without importing torch
    except (TypeError, RuntimeError, ValueError) as error:
        raise InvalidRequest(
            f"{field} cannot be read ({error}); it must be a float32 or float16 tensor on the CPU, without "
            "gradients, or an array",
            field=field,
        ) from error
    if array.dtype not in (np.float32, np.float16):
        raise InvalidRequest(f"{field} is {shown(embeds)} of {array.dtype}; it must be float32 or float16", field=field)
    return safetensors.numpy.save({EMBEDS: np.ascontiguousarray(array)})


_Array = np.ndarray[Any, np.dtype[Any]]


@runtime_checkable
class _Tensor(Protocol):
    """The methods of a torch tensor that are used here; this package imports no torch."""

    def detach(self) -> _Tensor: ...
    def cpu(self) -> _Tensor: ...
    def numpy(self) -> _Array: ...


def image_part(source: object, field: str) -> MediaPart:
    """Make a part of a PIL image, or of an array [H, W, 3], [3, H, W] or [H, W]: uint8, or floats in [0, 1]."""
    pixels = _pixels(source, field)
    return MediaPart("image", pixels.tobytes(), ArrayInfo("uint8", pixels.shape), field)


def audio_part(source: Any, field: str) -> MediaPart:
    """Make a part of samples [n] (or [1, n], [n, 1]), float in [-1, 1] or int16, at 16 kHz, or of `(samples, Hz)`."""
    rate: float | None = None
    if isinstance(source, tuple) and len(source) == 2:
        source, rate = source[0], _rate(source[1], f"{field}[1]", "samples per second, e.g. 16000")
    samples = _array(source, field, "samples, or (samples, rate)")
    if samples.ndim == 2 and 1 in samples.shape:
        samples = samples.reshape(-1)
    if samples.ndim != 1 or samples.size == 0:
        raise InvalidRequest(f"{field} has shape {list(samples.shape)}; audio is mono: [samples]", field=field)
    if samples.dtype == np.int16:
        samples = samples.astype(np.float32) / 32768
    elif np.issubdtype(samples.dtype, np.floating):
        samples = samples.astype(np.float32)
    else:
        raise InvalidRequest(f"{field} holds {samples.dtype}; samples are float in [-1, 1] or int16", field=field)
    if not np.isfinite(samples).all():
        raise InvalidRequest(f"{field} holds NaN or infinity; samples are in [-1, 1]", field=field)
    return MediaPart("audio", samples.astype("<f4").tobytes(), ArrayInfo("float32", samples.shape, rate), field)


def video_part(source: Any, field: str) -> MediaPart:
    """Make a part of frames [F, H, W, 3] or [F, 3, H, W], uint8 or floats in [0, 1], or images; or `(frames, fps)`."""
    rate: float | None = None
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], int | float):
        source, rate = source[0], _rate(source[1], f"{field}[1]", "frames per second, e.g. 24")
    if isinstance(source, list | tuple):
        images = [_pixels(frame, f"{field}[{index}]") for index, frame in enumerate(source)]
        if len({image.shape for image in images}) > 1:
            raise InvalidRequest(f"{field} has frames of different sizes; they must all be equal", field=field)
        frames = np.stack(images) if images else np.empty((0,), np.uint8)
    else:
        frames = _array(source, field, "frames, or (frames, frames per second)")
        if frames.ndim == 4:
            frames = _uint8(_channels_last(frames), field)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.size == 0:
        raise InvalidRequest(f"{field} has shape {list(frames.shape)}; frames are [F, H, W, 3]", field=field)
    return MediaPart("video", frames.tobytes(), ArrayInfo("uint8", frames.shape, rate), field)


def is_one(kind: str, entries: list[Any]) -> bool:
    """Whether a list is a single medium: the frames of a video, or the samples of a recording."""
    first = entries[0] if entries else None
    if kind == "video":
        return isinstance(first, Image.Image) or (isinstance(first, np.ndarray) and first.ndim == 3)
    return kind == "audio" and isinstance(first, int | float)


def named_tensor(source: object, name: str, field: str) -> MediaPart:
    """Make a part of an array or torch tensor of numbers, or of nested lists of them."""
    array = _array(source, field, "an array, or nested lists of numbers")
    if array.dtype.kind not in "fiub":
        raise InvalidRequest(f"{field}.data holds {array.dtype}; it must hold numbers", field=f"{field}.data")
    return tensor_part(array, name, field, written=isinstance(source, Sequence))


def _pixels(source: object, field: str) -> _Array:
    """Return [H, W, 3] uint8."""
    if isinstance(source, Image.Image):
        # upright, like transformers' own image loader
        return np.asarray(ImageOps.exif_transpose(source).convert("RGB"))
    pixels = _array(source, field, "a PIL image, a path, the bytes of a file, or an array")
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=2)
    pixels = _channels_last(pixels)
    if pixels.ndim != 3 or pixels.shape[-1] != 3 or pixels.size == 0:
        raise InvalidRequest(f"{field} has shape {list(pixels.shape)}; an image is [H, W, 3]", field=field)
    return _uint8(pixels, field)


def _channels_last(array: _Array) -> _Array:
    """Move torch's channel axis to the end."""
    if array.ndim >= 3 and array.shape[-3] == 3 and array.shape[-1] != 3:
        return np.moveaxis(array, -3, -1)
    return array


def _uint8(array: _Array, field: str) -> _Array:
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if np.issubdtype(array.dtype, np.floating):
        if not (array.size and np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise InvalidRequest(f"{field} holds floats outside [0, 1]; give [0, 1], or uint8 0–255", field=field)
        return np.ascontiguousarray(np.rint(array * 255).astype(np.uint8))
    raise InvalidRequest(f"{field} holds {array.dtype}; pixels are uint8, or float in [0, 1]", field=field)


def _array(source: object, field: str, right: str) -> _Array:
    if isinstance(source, np.ndarray):
        return source
    try:
        if isinstance(source, _Tensor):
            return np.asarray(source.detach().cpu().numpy())
        if isinstance(source, Sequence) and not isinstance(source, str | bytes):
            return np.asarray(source)
    except (TypeError, ValueError) as error:  # numpy has no bfloat16; ragged lists have no shape
        raise InvalidRequest(f"{field} is {shown(type(source).__name__)}: {error}", field=field) from error
    raise InvalidRequest(f"{field} is a {type(source).__name__}; it must be {right}", field=field)


def _rate(value: object, field: str, right: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e7:
        raise wrong(field, value, right)
    return float(value)
