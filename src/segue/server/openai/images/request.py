"""Converts the body of `/v1/images/*` (OpenAI's, with the pipelines' arguments) into a checked `Request`."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from segue.media.parts import STRING, image_parts, object_of
from segue.messages.diffusion import PARAMETERS, SIZE, DiffusionParams, check_diffusion
from segue.messages.errors import InvalidRequest, SegueError, TooLarge, TooLong, shown
from segue.messages.formats import Format, check_image_format, check_image_sides
from segue.messages.limits import check_carried
from segue.messages.request import MediaPart, Message, Request
from segue.orchestrator.service import ModelCard
from segue.server.generation.parameters import check_model, parse_body, turn_fields
from segue.server.http.body import check_integers, check_names
from segue.server.http.errors import Unsupported, not_for_this_model
from segue.server.openai.images.names import check_called
from segue.server.settings import ServerSettings

MAX_PROMPT = 32_000
"""Characters; OpenAI's limit."""
MAX_IMAGES = 16
"""Images per request; OpenAI's limit."""
MAX_MASK_BYTES = 4 * 1024 * 1024
"""Bytes; OpenAI's limit."""
_PNG = b"\x89PNG\r\n\x1a\n"
_TEXTS = ("negative_prompt", "prompt_2", "prompt_3", "negative_prompt_2", "negative_prompt_3")


FILE = {"anyOf": [{"type": "string"}, object_of(("image_url",), {"image_url": STRING}, ("image_url",))]}
"""A file's bytes (in a form), or a URL, bare or in an object."""
File = Annotated[Any, msgspec.Meta(extra_json_schema=FILE)]


class PaintingBody(DiffusionParams, kw_only=True, frozen=True):
    """Parameters of every endpoint that makes images or video. null means not given."""

    prompt: str
    model: str | None = None
    """Default: the served model."""
    size: str | None = None
    """`WIDTHxHEIGHT` in pixels."""
    seed: int | None = None
    user: str | None = None
    """The tenant, for fair scheduling."""
    priority: int | None = None
    options: dict[str, Any] | None = None
    """Options of the model family, by name."""
    pipeline_arguments: dict[str, Any] | None = None
    """Further arguments of the served pipeline, by name."""


class ImageBody(PaintingBody, kw_only=True, frozen=True):
    """Every parameter of `/v1/images/generations` that has an effect."""

    n: int | None = None
    response_format: str | None = None
    output_format: str | None = None
    output_compression: int | None = None
    """Quality, 0 to 100, of WebP and JPEG."""
    stream: bool | None = None
    deadline: float | None = None
    """Seconds from now."""


class EditBody(ImageBody, kw_only=True, frozen=True):
    """Every parameter of `/v1/images/edits` that has an effect."""

    image: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": [FILE, {"type": "array", "items": FILE}]})]
    """One or several files or URLs."""
    mask: File = None
    """A PNG file as large as the (first) image, fully transparent in the part to repaint."""
    image_reference: File = None
    """A file or URL: an image that the repainted part should resemble."""


EDIT_FILES = frozenset({"image", "mask", "image_reference"})
"""Fields of `EditBody` that are files."""

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "background": ("auto", "opaque"),
    "quality": ("auto", "standard"),
    "style": (),
    "moderation": ("auto", "low"),
    "complexity": (),
    "frame_count": (),
    "frame_duration_ms": (),
    "svg": (),
}
"""Unsupported parameters of OpenAI's → values that have no effect (null always does)."""

UNSUPPORTED_OF_EDITS: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "input_fidelity": ("low",),
    "markup": (),
}

P = TypeVar("P", bound=PaintingBody)


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """A checked request, and how to answer it."""

    request: Request
    size: str | None
    """The size as the client wrote it."""
    n_given: bool
    output_format: str
    stream: bool
    event: str
    """The prefix of event names."""

    def as_written(self, error: SegueError) -> SegueError:
        """An error of the stages, with the client's names."""
        return as_written(error, self.size, self.n_given, self.request.options)


def image_request(
    body: ImageBody, card: ModelCard, settings: ServerSettings, *, event: str, images: list[MediaPart]
) -> ImageRequest:
    """Check everything that needs no stage. Raises `InvalidRequest`."""
    if body.response_format not in (None, "b64_json"):
        right = "images are not stored: leave it out, or use b64_json"
        if body.response_format == "url":
            raise Unsupported(f"response_format is 'url'; {right}", field="response_format")
        raise InvalidRequest(f"response_format is {shown(body.response_format)}; {right}", field="response_format")
    stream = bool(body.stream)
    if not stream and (given := "partial_images" if body.partial_images else "progress" if body.progress else None):
        raise InvalidRequest(f"{given} is given, but stream is not true", field=given)
    output_format = check_image_format("png" if body.output_format is None else body.output_format, "output_format")
    request = painting_request(body, card, settings, prefix="img", modality="image", images=images)
    request.diffusion = params = _with_count(body, request.diffusion or DiffusionParams())
    check_image_sides(params.height or 0, params.width or 0, output_format, "output_format")
    request.deadline = turn_fields(None, None, body.deadline, time.time(), card)["deadline"]
    quality = _quality(body.output_compression, output_format)
    request.formats = {"image": Format(name=output_format, quality=quality, base64=True)}
    return ImageRequest(
        request=request,
        size=body.size,
        n_given=body.n is not None,
        output_format=output_format,
        stream=stream,
        event=event,
    )


def edited_images(body: EditBody, card: ModelCard, settings: ServerSettings) -> list[MediaPart]:
    """The input images. Blocking (HTTP). Raises `InvalidRequest`."""
    if "image" in card.gives and "image" not in card.takes:
        raise not_for_this_model("takes no images")
    several = isinstance(body.image, list)
    given = body.image if several else [body.image]
    if not given:
        raise InvalidRequest("image is empty; give at least one image", field="image")
    if len(given) > MAX_IMAGES:
        raise TooLarge(f"image has {len(given)} images; at most {MAX_IMAGES} are taken", field="image")
    sources = [image_source(one, f"image[{index}]" if several else "image") for index, one in enumerate(given)]
    named: dict[str, object] = {"image": sources if several else sources[0]}
    for name, one in (("mask", body.mask), ("image_reference", body.image_reference)):
        if one is not None:
            named[name] = image_source(one, name)
    images = image_parts(named, settings.media)
    for image in images:
        if image.role == "mask":
            _check_mask(image)
    return images


def _check_mask(mask: MediaPart) -> None:
    """Check a mask without decoding it. Raises `InvalidRequest`."""
    if not mask.data.startswith(_PNG):
        raise InvalidRequest(
            "mask is not a PNG file; send one that is transparent where the image is repainted", field="mask"
        )
    if len(mask.data) >= MAX_MASK_BYTES:
        raise InvalidRequest(f"mask has {len(mask.data)} bytes; it must be less than {MAX_MASK_BYTES}", field="mask")


def with_one_name(values: dict[str, Any]) -> dict[str, Any]:
    """Merge OpenAI's two names of the images: `image` in a form, `images` in JSON. Raises `InvalidRequest`."""
    if (several := values.get("images")) is None:
        return values
    if values.get("image") is not None:
        raise InvalidRequest("images and image are given, but mean the same; give one", field="images")
    if not isinstance(several, list):
        raise InvalidRequest(f"images is {shown(several)}; it must be a list", field="images")
    return {name: value for name, value in values.items() if name != "images"} | {"image": several}


def image_source(source: object, field: str) -> bytes | str:
    """The bytes of a file, or a URL, which may be in `{"image_url": URL}`. Raises `InvalidRequest`."""
    if isinstance(source, Mapping):
        if set(source) != {"image_url"}:
            has = ", ".join(map(shown, source)) or "nothing in it"
            raise Unsupported(f"{field} has {has}; send a file, a URL or image_url", field=field)
        source = source["image_url"]
    if isinstance(source, list):
        raise InvalidRequest(f"{field} is a list of {len(source)}; it must be one file or URL", field=field)
    if not isinstance(source, bytes | str):
        raise InvalidRequest(f"{field} is {shown(source)}; it must be a file or a URL", field=field)
    return source


def painting_body(
    values: dict[str, Any], kind: type[P], unsupported: dict[str, tuple[object, ...]], instead: Mapping[str, str]
) -> P:
    """The typed body. `instead`: unknown name → this endpoint's counterpart. Raises `InvalidRequest`."""
    check_called(values, {*kind.__struct_fields__, *unsupported}, instead)
    given = {name: value for name, value in values.items() if value is not None or name not in PARAMETERS}
    check_integers(given)
    return parse_body(given, kind, unsupported, {})


def painting_request(
    body: PaintingBody,
    card: ModelCard,
    settings: ServerSettings,
    *,
    prefix: str,
    modality: str,
    images: list[MediaPart],
) -> Request:
    """One generation of images or video, with a new id. Raises `InvalidRequest`."""
    if body.model is not None:
        check_model(body.model, card, settings)
    if modality not in card.gives:
        raise not_for_this_model(f"makes no {modality}")
    _check_text("prompt", body.prompt)
    for name in _TEXTS:
        _check_text(name, getattr(body, name) or "")
    if body.seed is not None and not -(2**63) <= body.seed < 2**64:
        raise InvalidRequest(f"seed is {body.seed}; it must be a 64-bit integer", field="seed")
    params = DiffusionParams(**{name: getattr(body, name) for name in DiffusionParams.__struct_fields__})
    params = _with_size(body.size, params)
    for name in DiffusionParams.__struct_fields__:
        check_carried(getattr(params, name), name)
    check_diffusion(params)
    return Request(
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        prompt=body.prompt,
        messages=[Message("user", list(images))] if images else [],
        modalities=[modality],
        diffusion=params,
        seed=secrets.randbits(63) if body.seed is None else body.seed,  # drawn here, because the answer reports it
        **turn_fields(body.priority, body.user, None, 0, card),
        adapter=body.model if body.model in card.adapters else None,
        options={**_options(body.options or {}, card), **_pipeline_arguments(body.pipeline_arguments or {}, card)},
    )


def as_written(
    error: SegueError, size: str | None, n_given: bool = False, arguments: Collection[str] = ()
) -> SegueError:
    """An error of the stages, with the client's names. `size`: where the client wrote one; `arguments`: names in
    `pipeline_arguments`."""
    message, field = error.message, error.field
    if size is not None and field in ("height", "width"):
        message, field = f"size is {size}: {message}", "size"
    elif n_given and field == "num_images_per_prompt":
        message, field = message.replace(field, "n"), "n"
    elif field is not None and field in arguments:
        field = f"pipeline_arguments.{field}"
    else:
        return error
    renamed = type(error)(message, field=field, stage=error.stage)
    renamed.__cause__ = error
    return renamed


def _options(given: dict[str, Any], card: ModelCard) -> dict[str, Any]:
    """The family's options. Raises `InvalidRequest` for unknown ones."""
    check_names(given, card.options, "options")
    check_carried(given, "options")
    return given


def _pipeline_arguments(given: dict[str, Any], card: ModelCard) -> dict[str, Any]:
    """Further arguments of the pipeline; its stages check their names. Raises `InvalidRequest`."""
    for name, value in given.items():
        field = f"pipeline_arguments.{name}"
        if not card.open_options:
            raise InvalidRequest(
                f"{field}: this model takes only the request's own arguments, e.g. {', '.join(_TEXTS[:2])}; "
                "pipeline_arguments is for pipelines that are served whole",
                field=field,
            )
        if name in PARAMETERS:
            raise InvalidRequest(f"{field} is a parameter of the request: write it next to prompt", field=field)
        check_carried({name: value}, field)
    return given


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_PROMPT:
        raise TooLong(f"{name} has {len(text)} characters; at most {MAX_PROMPT} are taken", field=name)
    check_carried(text, name)


def _with_size(size: str | None, params: DiffusionParams) -> DiffusionParams:
    if size is None or size == "auto":
        return params
    match = SIZE.fullmatch(size)
    if match is None:
        raise InvalidRequest(
            f"size is {shown(size)}; it must be WIDTHxHEIGHT in pixels, e.g. 1024x1024, or auto", field="size"
        )
    if params.width is not None or params.height is not None:
        raise InvalidRequest(f"size is {size}, and width or height is given as well; give one", field="size")
    return msgspec.structs.replace(params, width=int(match[1]), height=int(match[2]))


def _with_count(body: ImageBody, params: DiffusionParams) -> DiffusionParams:
    if body.n is None:
        return params
    if body.n < 1:
        raise InvalidRequest(f"n is {body.n}; it must be at least 1", field="n")
    if params.num_images_per_prompt not in (1, body.n):
        raise InvalidRequest(
            f"n is {body.n} and num_images_per_prompt {params.num_images_per_prompt}; give one", field="n"
        )
    return msgspec.structs.replace(params, num_images_per_prompt=body.n)


def _quality(compression: int | None, output_format: str) -> int:
    if compression is None:
        return 100
    if not 0 <= compression <= 100:
        raise InvalidRequest(
            f"output_compression is {compression}; it must be from 0 to 100", field="output_compression"
        )
    if output_format == "png" and compression != 100:
        raise InvalidRequest(
            f"output_compression is {compression}, but png is always lossless; use webp or jpeg, or leave it out",
            field="output_compression",
        )
    return compression
