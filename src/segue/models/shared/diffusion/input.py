"""The input stage of a family that generates images or video: checks requests against the deployment's limits and fills
in defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from PIL import Image

from segue.engines.contract import LoadContext, Payload
from segue.engines.module.contract import Result
from segue.media.image import decode_image
from segue.media.limits import MediaLimits
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, TooLarge
from segue.messages.request import MediaPart, Request, TextPart
from segue.models.shared.diffusion.denoiser.schedulers import Schedulers
from segue.models.shared.diffusion.library import VaeImageProcessor
from segue.models.shared.diffusion.masks import MASKS, mask_image, mask_latents
from segue.models.shared.diffusion.sizes import Sizes
from segue.models.shared.input_stage import InputStage


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Limits of one request's output; the defaults are those of `segue.graph.deployment.deployment.Limits`."""

    max_output_pixels: int = 4_194_304
    """Height times width of an image or frame."""
    max_inference_steps: int = 200
    max_output_frames: int = 257
    max_outputs: int = 10

    @classmethod
    def of(cls, ctx: LoadContext) -> OutputLimits:
        """The limits that the worker passes to the input stage."""
        return cls(**ctx.options.get("output_limits", {}))


COMMON = frozenset(
    ("height", "width", "num_inference_steps", "num_images_per_prompt", "scheduler", "progress", "partial_images",
     "guidance_interval", "step_cache", "step_cache_threshold")
)  # fmt: skip
"""Fields of `DiffusionParams` that every family accepts."""

ALWAYS_PARTIAL = 3
"""OpenAI's clients may request up to this many previews whatever the number of steps; with few steps, fewer are
sent."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for the requests that a checkpoint accepts."""

    defaults: DiffusionParams
    """The pipeline's defaults."""
    takes: frozenset[str]
    """Fields of `DiffusionParams` that it accepts in addition to `COMMON`."""
    sizes: Sizes
    """The output sizes, as the family states them before anything is loaded."""
    max_sequence_length: int | None = None
    """Upper bound of the request's `max_sequence_length`."""
    images: tuple[int, int] = (0, 0)
    """Minimum and maximum number of images of a request, a mask not counted."""
    roles: frozenset[str] = frozenset()
    """Accepted roles of images (`MediaPart.role`) besides the plain image, e.g. `last_image`."""
    with_image: DiffusionParams | None = None
    """For requests with an image: overrides of `defaults`; None: no overrides."""
    with_mask: DiffusionParams | None = None
    """For requests with a mask: overrides of `defaults`, instead of `with_image`; None: masks are refused."""
    mask_scale: int = 8
    """Pixels per latent, in height and in width: the factor by which a mask is downscaled."""

    @property
    def multiple(self) -> int:
        """Height and width are multiples of this many pixels."""
        return self.sizes.multiple


@dataclass(frozen=True, slots=True)
class InputImage:
    """A decoded image of the request."""

    image: Image.Image
    role: str
    """`MediaPart.role`."""


class DiffusionInput(InputStage):
    """`ModuleModel`: a request → the payload that `segue.models.shared.diffusion.transfers` documents."""

    def __init__(self, ctx: LoadContext, rules: Rules) -> None:
        self.rules = rules
        self.schedulers = Schedulers(ctx.model_dir, across=True)
        self._limits = OutputLimits.of(ctx)
        self._media = MediaLimits.from_options(ctx.options.get("limits", {}))
        self.budget = self._media.budget

    def texts(self, prompt: str, params: DiffusionParams, images: Sequence[InputImage]) -> list[Any]:
        """The items for the text encoder: the prompt's, then the negative prompt's if guidance needs it. Empty for a
        model without a text encoder."""
        return []

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        """Tokens of the prompt that the denoiser reads, without padding, for usage. `item`: the first of `texts`."""
        return 0

    def completed(self, params: DiffusionParams, images: Sequence[InputImage]) -> DiffusionParams:
        """Fill in defaults for fields that the request leaves open."""
        open_ones = {name: value for name, value in _fields(self.rules.defaults) if getattr(params, name) is None}
        return msgspec.structs.replace(params, **open_ones)

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        """Further payload entries for the other stages."""
        return {}

    def process(self, request: Request) -> Payload:
        given = request.diffusion or DiffusionParams()
        self._check_taken(given)
        given = self._with_frames(given)
        prompt = prompt_of(request)
        parts = images_of(request)
        masks = [part for part in parts if part.role in MASKS]
        parts = [part for part in parts if part.role not in MASKS]
        self._check_masks(masks)
        self._check_images(parts)
        images = [InputImage(Image.fromarray(decode_image(part, self._media)), part.role) for part in parts]
        size = next((one.image.size for one in images if not one.role), None)
        mask = mask_image(masks[0], size, self._media) if masks else None
        params = self.completed(self._opened(given, bool(images), mask is not None), images)
        if params.sigmas is not None:
            params = msgspec.structs.replace(params, num_inference_steps=len(params.sigmas))
        self._check(params)
        texts, more = self.texts(prompt, params, images), self.more(params, images)
        return {
            "texts": texts,
            "settings": msgspec.to_builtins(params),
            "counts": {
                "text": self.text_tokens(prompt, texts[0], params) if texts else 0,
                "image": sum(self._tokens(one) for one in more.get("images", ())),
            },
            **more,
            **({} if mask is None else {"mask": self._kept(mask, params)}),
        }

    def _tokens(self, image: torch.Tensor) -> int:
        """Latent tokens of an image in its encoder's input format: [3, H, W]."""
        multiple = self.rules.multiple
        return (image.shape[-2] // multiple) * (image.shape[-1] // multiple)

    def result(self, item: Any) -> Result:
        """As the base class says, with the tokens of the prompt and the images."""
        result = super().result(item)
        if result.payload is not None:
            result.modality_tokens = result.payload["counts"]
            result.prompt_tokens = sum(result.modality_tokens.values())
        return result

    # ── checks ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_taken(self, given: DiffusionParams) -> None:
        neutral = dict(_fields(DiffusionParams()))
        known = COMMON | self.rules.takes | ({"seconds"} if "num_frames" in self.rules.takes else set())
        for name, value in _fields(given):
            if value != neutral.get(name) and name not in known:
                raise InvalidRequest(f"this model takes no {name}; it takes {', '.join(sorted(known))}", field=name)

    def _opened(self, given: DiffusionParams, image: bool, mask: bool) -> DiffusionParams:
        """Fill in the defaults of a request with an image, or with a mask as well."""
        rules = self.rules
        own = rules.with_mask if mask else rules.with_image if image else None
        if own is None:
            if given.strength is not None:
                needed = "a mask" if rules.with_image is None else "an input image"
                raise InvalidRequest(f"strength goes with {needed}; the request has none", field="strength")
            return given
        opened = {name: value for name, value in _fields(own) if getattr(given, name) is None}
        return msgspec.structs.replace(given, **opened)

    def _kept(self, mask: Image.Image, params: DiffusionParams) -> Any:
        assert params.height is not None
        assert params.width is not None
        return mask_latents(mask, params.height, params.width, self.rules.mask_scale)

    def _check_masks(self, masks: Sequence[MediaPart]) -> None:
        for part in masks[:1] if self.rules.with_mask is None else masks[1:]:
            right = "at most one mask" if self.rules.with_mask is not None else f"no {part.role}"
            raise InvalidRequest(f"this model takes {right}", field=part.field or part.role)

    def _with_frames(self, given: DiffusionParams) -> DiffusionParams:
        """Convert seconds to frames: the nearest number that the model can generate."""
        if given.seconds is None:
            return given
        fps = given.fps or self.rules.defaults.fps
        if fps is None:
            raise InvalidRequest(
                "this model has no default frame rate; send num_frames, or fps as well", field="seconds"
            )
        steps = round(min(given.seconds * fps, 1e9) / self.rules.sizes.frame_step)
        return msgspec.structs.replace(given, seconds=None, num_frames=steps * self.rules.sizes.frame_step + 1)

    def _check_images(self, parts: Sequence[MediaPart]) -> None:
        for part in parts:
            if part.role and part.role not in self.rules.roles:
                raise InvalidRequest(f"this model takes no {part.role}", field=part.field or part.role)
        count = len(parts)
        least, most = self.rules.images
        if count > most:
            right = f"at most {most}" if most else "none"
            raise InvalidRequest(f"the request has {count} images; this model takes {right}", field="image")
        if count < least:
            raise InvalidRequest(f"the request has {count} images; this model needs {least}", field="image")

    def _check(self, params: DiffusionParams) -> None:
        limits = self._limits
        self.rules.sizes.check(params.height or 0, params.width or 0, limits.max_output_pixels)
        _bound("num_images_per_prompt", params.num_images_per_prompt, limits.max_outputs, "max_outputs")
        steps = params.num_inference_steps or 0
        if params.sigmas is not None and steps > limits.max_inference_steps:
            raise TooLarge(
                f"sigmas has {steps} noise levels; at most {limits.max_inference_steps} (max_inference_steps)",
                field="sigmas",
            )
        _bound("num_inference_steps", steps, limits.max_inference_steps, "max_inference_steps")
        if params.partial_images > max(ALWAYS_PARTIAL, steps - 1):
            raise InvalidRequest(
                f"partial_images is {params.partial_images}; {steps} steps have at most {steps - 1}",
                field="partial_images",
            )
        self.schedulers.check(params.scheduler, params.sigmas)
        if steps == 1 and self.schedulers.config.get("shift_terminal"):
            name, given = ("num_inference_steps", "is 1") if params.sigmas is None else ("sigmas", "has 1 noise level")
            raise InvalidRequest(
                f"{name} {given}; this model's scheduler rescales the noise levels between the first and the last "
                "(shift_terminal), so it needs at least 2",
                field=name,
            )
        longest = self.rules.max_sequence_length
        if longest is not None and (params.max_sequence_length or 0) > longest:
            raise InvalidRequest(
                f"max_sequence_length is {params.max_sequence_length}; this model reads at most {longest} tokens",
                field="max_sequence_length",
            )
        if params.num_frames is not None:
            _bound("num_frames", params.num_frames, limits.max_output_frames, "max_output_frames")
            self.rules.sizes.check_frames(params.num_frames)


def prompt_of(request: Request) -> str:
    """The text of a request: its prompt, or the text of its messages, joined. Raises `InvalidRequest`."""
    if request.prompt is not None:
        return request.prompt
    if request.prompt_token_ids is not None:
        raise InvalidRequest("this model reads text; send a prompt in place of prompt_token_ids", field="prompt")
    texts = [part.text for message in request.messages for part in message.content if isinstance(part, TextPart)]
    if not texts:
        raise InvalidRequest("the request has no text: it needs a prompt", field="prompt")
    return "\n".join(texts)


def negative_of(params: DiffusionParams) -> str | None:
    """The negative prompt, if true classifier-free guidance will use it."""
    return params.negative_prompt if (params.true_cfg_scale or 0) > 1 else None


def images_of(request: Request) -> list[MediaPart]:
    """The images of a request, in order."""
    return [
        part
        for message in request.messages
        for part in message.content
        if isinstance(part, MediaPart) and part.kind == "image"
    ]


def images_at(processor: VaeImageProcessor, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
    """The payload entry for the image encoder: `images`, [3, H, W] each, resized to the output size."""
    if not images:
        return {}
    height, width = params.height, params.width
    return {"images": [processor.preprocess(one.image, height=height, width=width)[0] for one in images]}


def _fields(params: DiffusionParams) -> list[tuple[str, Any]]:
    """(name, value) of the fields that are set."""
    return [(name, value) for name in params.__struct_fields__ if (value := getattr(params, name)) is not None]


def _bound(name: str, value: int, most: int, limit: str) -> None:
    if value > most:
        raise TooLarge(f"{name} is {value}; at most {most} ({limit})", field=name)
