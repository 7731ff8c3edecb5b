"""The input stage of Kontext: resizes images to the sizes that the network was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import MediaPart
from segue.models.images.flux.input import Input, rules_of
from segue.models.images.flux.sizes import adjusted, preferred
from segue.models.shared.diffusion.input import InputImage

REFERENCE = "image_reference"
"""Role of an image that shows what to paint under the mask."""


class KontextInput(Input):
    """`ModuleModel`. `images`: the edited image; with a mask also `image_reference`, if present.

    Option `auto_resize` (true): resize an image to the nearest size that the network was trained with; otherwise keep
    its size. With a mask, the output has the size of the resized image, as in the library's pipeline for masks.
    """

    def __init__(self, ctx: LoadContext) -> None:
        plain = rules_of(ctx)
        rules = replace(
            plain,
            takes=plain.takes | {"max_area"},
            with_image=None,
            with_mask=DiffusionParams(strength=1.0),
        )
        super().__init__(ctx, rules)
        self._auto_resize = ctx.options.get("auto_resize", True)
        if not isinstance(self._auto_resize, bool):
            raise ConfigError(f"auto_resize is {self._auto_resize!r}; it must be true or false", field="auto_resize")

    def completed(self, params: DiffusionParams, images: Sequence[InputImage]) -> DiffusionParams:
        masked = params.strength is not None  # only requests with a mask have a strength
        if not masked and any(one.role for one in images):
            raise InvalidRequest(
                f"{REFERENCE} shows what to paint under a mask; the request has no mask",
                field=REFERENCE,
            )
        asked, params = params, super().completed(params, images)
        if masked:
            [edited] = [one for one in images if not one.role]
            height, width = self._seen(edited)
            _check_size(asked, height, width)
        else:
            height, width = adjusted(params.height or 0, params.width or 0, params.max_area, self.rules.multiple)
        return msgspec.structs.replace(params, height=height, width=width)

    def more(self, params: DiffusionParams, images: Sequence[InputImage]) -> Payload:
        ordered = sorted(images, key=lambda one: one.role != "")
        seen = [(one.image, *self._seen(one)) for one in ordered]
        made = [self._images.preprocess(image, height=height, width=width)[0] for image, height, width in seen]
        return {"images": made} if made else {}

    def _check_images(self, parts: Sequence[MediaPart]) -> None:
        super()._check_images([part for part in parts if part.role != REFERENCE])

    def _seen(self, image: InputImage) -> tuple[int, int]:
        """Height and width of an image after resizing. Raises `InvalidRequest`."""
        height, width, multiple = image.image.height, image.image.width, self.rules.multiple
        if self._auto_resize:
            return preferred(height, width, multiple)
        if min(height, width) < multiple:
            name = image.role or "image"
            raise InvalidRequest(
                f"{name} is {width} x {height}; this model needs at least {multiple} x {multiple} pixels",
                field=name,
            )
        return height // multiple * multiple, width // multiple * multiple


def _check_size(asked: DiffusionParams, height: int, width: int) -> None:
    """Raises `InvalidRequest` if the request asks for another size than the resized image's."""
    if asked.max_area is not None:
        raise InvalidRequest(
            f"max_area is {asked.max_area}; with a mask, the output has the size of the resized image: leave it out",
            field="max_area",
        )
    for name, given, made in (("height", asked.height, height), ("width", asked.width, width)):
        if given not in (None, made):
            raise InvalidRequest(
                f"{name} is {given}; with a mask, the output has the size of the resized image, {width} x {height}: "
                "leave the size out",
                field=name,
            )
