"""The input stage of a family that makes pictures or video: checks what is asked for and fills in the defaults."""

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
from segue.models.diffusion.library import VaeImageProcessor
from segue.models.diffusion.limits import OutputLimits
from segue.models.diffusion.masks import MASKS, mask_latents, mask_picture
from segue.models.diffusion.schedulers import Schedulers
from segue.models.diffusion.sizes import Sizes
from segue.models.input_stage import InputStage

COMMON = frozenset(
    ("height", "width", "num_inference_steps", "num_images_per_prompt", "scheduler", "progress", "partial_images",
     "guidance_interval", "step_cache", "step_cache_threshold")
)  # fmt: skip
"""What every family takes."""

ALWAYS_PARTIAL = 3
"""As many previews as OpenAI's clients may ask for are never too many; of few steps, fewer come."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a checkpoint can be asked for."""

    defaults: DiffusionParams
    """What the pipeline takes where a request says nothing."""
    takes: frozenset[str]
    """Fields of `DiffusionParams` it understands, besides `COMMON`."""
    sizes: Sizes
    """What it makes, as the family tells it before anything is loaded."""
    max_sequence_length: int | None = None
    """Most tokens of a prompt that can be asked for."""
    pictures: tuple[int, int] = (0, 0)
    """How few and how many pictures a request carries, a mask not counted."""
    roles: frozenset[str] = frozenset()
    """What pictures may be besides the pictures themselves (`MediaPart.role`), e.g. `last_image`."""
    with_picture: DiffusionParams | None = None
    """Of requests with a picture, what goes before `defaults`; None where nothing does."""
    with_mask: DiffusionParams | None = None
    """Of requests with a mask, what goes before `defaults`, in place of `with_picture`; None: masks are not taken."""
    mask_scale: int = 8
    """Pixels per latent, in height and in width: what a mask is shrunk by."""

    @property
    def multiple(self) -> int:
        """Height and width are multiples of this many pixels."""
        return self.sizes.multiple


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of the request, decoded."""

    image: Image.Image
    role: str
    """`MediaPart.role`."""


class DiffusionInput(InputStage):
    """`ModuleAdapter`: a request → what `segue.models.diffusion.transfers` says."""

    def __init__(self, ctx: LoadContext, rules: Rules) -> None:
        self.rules = rules
        self.schedulers = Schedulers(ctx.model_dir, across=True)
        self._limits = OutputLimits.of(ctx)
        self._media = MediaLimits.from_options(ctx.options.get("limits", {}))

    def texts(self, prompt: str, params: DiffusionParams, pictures: Sequence[Picture]) -> list[Any]:
        """The items for the text encoder: the prompt's, then the negative prompt's, where guidance needs it. None of a
        model that reads no text."""
        return []

    def text_tokens(self, prompt: str, item: Any, params: DiffusionParams) -> int:
        """Tokens of the prompt that the denoiser reads, padding not counted: for usage. `item`: the first of
        `texts`."""
        return 0

    def completed(self, params: DiffusionParams, pictures: Sequence[Picture]) -> DiffusionParams:
        """With defaults for what the request leaves open."""
        open_ones = {name: value for name, value in _fields(self.rules.defaults) if getattr(params, name) is None}
        return msgspec.structs.replace(params, **open_ones)

    def more(self, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
        """What else the stages need."""
        return {}

    def process(self, request: Request) -> Payload:
        given = request.diffusion or DiffusionParams()
        self._check_taken(given)
        given = self._with_frames(given)
        prompt = prompt_of(request)
        parts = pictures_of(request)
        masks = [part for part in parts if part.role in MASKS]
        parts = [part for part in parts if part.role not in MASKS]
        self._check_masks(masks)
        self._check_pictures(parts)
        pictures = [Picture(Image.fromarray(decode_image(part, self._media)), part.role) for part in parts]
        size = next((one.image.size for one in pictures if not one.role), None)
        mask = mask_picture(masks[0], size, self._media) if masks else None
        params = self.completed(self._opened(given, bool(pictures), mask is not None), pictures)
        if params.sigmas is not None:
            params = msgspec.structs.replace(params, num_inference_steps=len(params.sigmas))
        self._check(params)
        texts, more = self.texts(prompt, params, pictures), self.more(params, pictures)
        return {
            "texts": texts,
            "settings": msgspec.to_builtins(params),
            "counts": {
                "text": self.text_tokens(prompt, texts[0], params) if texts else 0,
                "image": sum(self._tokens(one) for one in more.get("pictures", ())),
            },
            **more,
            **({} if mask is None else {"mask": self._kept(mask, params)}),
        }

    def _tokens(self, picture: torch.Tensor) -> int:
        """Latent tokens of a picture as its encoder gets it: [3, H, W]."""
        multiple = self.rules.multiple
        return (picture.shape[-2] // multiple) * (picture.shape[-1] // multiple)

    def _result(self, request: Request) -> Result:
        result = super()._result(request)
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

    def _opened(self, given: DiffusionParams, picture: bool, mask: bool) -> DiffusionParams:
        """With what is taken by default of a request with a picture, or with a mask as well."""
        rules = self.rules
        own = rules.with_mask if mask else rules.with_picture if picture else None
        if own is None:
            if given.strength is not None:
                needed = "a mask" if rules.with_picture is None else "a picture to begin with"
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
        """What lasts so many seconds as frames: the nearest number that the model makes."""
        if given.seconds is None:
            return given
        fps = given.fps or self.rules.defaults.fps
        if fps is None:
            raise InvalidRequest("this model knows no frame rate; send num_frames, or fps as well", field="seconds")
        steps = round(min(given.seconds * fps, 1e9) / self.rules.sizes.frame_step)
        return msgspec.structs.replace(given, seconds=None, num_frames=steps * self.rules.sizes.frame_step + 1)

    def _check_pictures(self, parts: Sequence[MediaPart]) -> None:
        for part in parts:
            if part.role and part.role not in self.rules.roles:
                raise InvalidRequest(f"this model takes no {part.role}", field=part.field or part.role)
        count = len(parts)
        least, most = self.rules.pictures
        if count > most:
            right = f"at most {most}" if most else "none"
            raise InvalidRequest(f"the request has {count} pictures; this model takes {right}", field="image")
        if count < least:
            raise InvalidRequest(f"the request has {count} pictures; this model needs {least}", field="image")

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
                f"{name} {given}; this model's scheduler stretches the noise levels between the first and the last "
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
    """The text of a request: its prompt, or what its messages say, one after the other. Raises `InvalidRequest`."""
    if request.prompt is not None:
        return request.prompt
    if request.prompt_token_ids is not None:
        raise InvalidRequest("this model reads text; send a prompt in place of prompt_token_ids", field="prompt")
    texts = [part.text for message in request.messages for part in message.content if isinstance(part, TextPart)]
    if not texts:
        raise InvalidRequest("the request says nothing: it needs a prompt", field="prompt")
    return "\n".join(texts)


def negative_of(params: DiffusionParams) -> str | None:
    """The negative prompt, where true classifier-free guidance has a use for it."""
    return params.negative_prompt if (params.true_cfg_scale or 0) > 1 else None


def pictures_of(request: Request) -> list[MediaPart]:
    """The pictures a request carries, in order."""
    return [
        part
        for message in request.messages
        for part in message.content
        if isinstance(part, MediaPart) and part.kind == "image"
    ]


def pictures_at(processor: VaeImageProcessor, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
    """What goes to the encoder of a picture that a request begins with: `pictures`, [3, H, W] each, of the size that is
    made."""
    if not pictures:
        return {}
    height, width = params.height, params.width
    return {"pictures": [processor.preprocess(one.image, height=height, width=width)[0] for one in pictures]}


def _fields(params: DiffusionParams) -> list[tuple[str, Any]]:
    """(name, value) of what is set."""
    return [(name, value) for name in params.__struct_fields__ if (value := getattr(params, name)) is not None]


def _bound(name: str, value: int, most: int, limit: str) -> None:
    if value > most:
        raise TooLarge(f"{name} is {value}; at most {most} ({limit})", field=name)
