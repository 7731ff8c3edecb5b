"""Converts the body of `/v1/videos` (OpenAI's, with the pipelines' arguments) into a `Request` and its job."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from segue.media.parts import image_parts, tensors_from
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, SegueError, wrong
from segue.messages.formats import check_video_sides
from segue.messages.request import MediaPart, Request
from segue.messages.tensors import check_tensors
from segue.orchestrator.service import ModelCard
from segue.server.generation.parameters import served_names
from segue.server.http.errors import Unsupported
from segue.server.openai.images.names import OF_VIDEOS, ONE_VIDEO
from segue.server.openai.images.request import File, PaintingBody, image_source, painting_body, painting_request
from segue.server.openai.images.request import as_written as size_as_written
from segue.server.openai.videos.store import VideoJob
from segue.server.settings import ServerSettings

FILES = frozenset({"input_reference", "last_image"})
_UNSUPPORTED: dict[str, tuple[object, ...]] = {"characters": ([],)}


class VideoBody(PaintingBody, kw_only=True, frozen=True):
    """Every parameter that has an effect. null means not given."""

    prompt: str = ""
    """Required if the model takes text."""
    input_reference: File = None
    """The first frame: a file, a URL, or `{"image_url": URL}`."""
    n: int | None = None
    """1: a job makes one video."""
    num_videos_per_prompt: int | None = None
    """The pipelines' name for `n`."""
    last_image: File = None
    """Additional: the last frame."""
    tensors: dict[str, Any] | None = None
    """Additional: named tensors of a model of one's own: name → nested lists, or `{"dtype", "shape", "data"}`."""


def video_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> tuple[VideoJob, Request]:
    """Check everything that needs no stage. Blocking (HTTP). Raises `InvalidRequest`."""
    body = painting_body(_with_seconds(values), VideoBody, _UNSUPPORTED, OF_VIDEOS)
    counts = {
        "n": body.n,
        "num_videos_per_prompt": body.num_videos_per_prompt,
        "num_images_per_prompt": body.num_images_per_prompt,
    }
    for name, value in counts.items():
        if value not in (None, 1):
            raise Unsupported(f"{name} is {value}; {ONE_VIDEO}", field=name)
    if body.partial_images:
        raise Unsupported(
            f"partial_images is {body.partial_images}; a job has no previews: leave it out", field="partial_images"
        )
    prompted = values.get("prompt") is not None
    if "text" in card.takes and not prompted:
        raise InvalidRequest("prompt is missing", field="prompt")
    tensors = tensors_from(body.tensors or {}, settings.media, "tensors")
    check_tensors(tensors, card.tensors, {})
    media = [*_images(body, card, settings), *tensors]
    request = painting_request(body, card, settings, prefix="video", modality="video", images=media)
    if media and not prompted:
        request.prompt = None
    params = request.diffusion or DiffusionParams()
    height, width = params.height or 0, params.width or 0
    check_video_sides(height, width, "size" if body.size is not None else "height" if height >= width else "width")
    assert request.seed is not None  # drawn if the client gave none
    now = time.time()
    job = VideoJob(
        id=request.request_id.replace("-", "_"),
        model=body.model or served_names(card, settings)[0],
        prompt=body.prompt,
        created=now,
        seed=request.seed,
        size=body.size or "auto",
        seconds="auto" if body.seconds is None else f"{body.seconds:g}",
    )
    return job, request


def as_written(error: SegueError, size: str, seconds: str, arguments: Collection[str] = ()) -> SegueError:
    """An error of the stages, with the client's names. `arguments`: names in `pipeline_arguments`."""
    if error.field == "num_frames" and seconds != "auto":
        return type(error)(f"seconds is {seconds}: {error.message}", field="seconds", stage=error.stage)
    return size_as_written(error, None if size == "auto" else size, arguments=arguments)


def _with_seconds(values: dict[str, Any]) -> dict[str, Any]:
    """Accept `seconds` as text, as OpenAI's clients send it."""
    seconds = values.get("seconds")
    if not isinstance(seconds, str):
        return values
    try:
        return {**values, "seconds": float(seconds)}
    except ValueError as error:
        raise wrong("seconds", seconds, "a number") from error


def _images(body: VideoBody, card: ModelCard, settings: ServerSettings) -> list[MediaPart]:
    named = {}
    for name, source in (("input_reference", body.input_reference), ("last_image", body.last_image)):
        if source is None:
            continue
        if "image" not in card.takes:
            raise Unsupported(f"this model takes no images: leave {name} out", field=name)
        named[name] = image_source(source, name)
    return image_parts(named, settings.media)
