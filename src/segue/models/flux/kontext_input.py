"""The input stage of Kontext: pictures in the sizes that the network was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from segue.engines.contract import LoadContext, Payload
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import MediaPart
from segue.models.diffusion.input import Picture
from segue.models.flux.input import Input, rules_of
from segue.models.flux.sizes import adjusted, preferred

REFERENCE = "image_reference"
"""What the part that is made anew is to be like, beside a mask."""


class KontextInput(Input):
    """`ModuleAdapter`. `pictures`: the one that is edited; with a mask also `image_reference`, where there is one.

    Option `auto_resize` (true): a picture is seen in the nearest of the sizes the network was trained with; else as it
    is. With a mask, what is made has the size of the picture as it is seen, as in the library's pipeline for that.
    """

    def __init__(self, ctx: LoadContext) -> None:
        plain = rules_of(ctx)
        rules = replace(
            plain,
            takes=plain.takes | {"max_area"},
            with_picture=None,
            with_mask=DiffusionParams(strength=1.0),
        )
        super().__init__(ctx, rules)
        self._auto_resize = ctx.options.get("auto_resize", True)
        if not isinstance(self._auto_resize, bool):
            raise ConfigError(f"auto_resize is {self._auto_resize!r}; it must be true or false", field="auto_resize")

    def completed(self, params: DiffusionParams, pictures: Sequence[Picture]) -> DiffusionParams:
        masked = params.strength is not None  # which there is with a mask alone
        if not masked and any(one.role for one in pictures):
            raise InvalidRequest(
                f"{REFERENCE} says what the part that a mask opens is to be like; the request has no mask",
                field=REFERENCE,
            )
        asked, params = params, super().completed(params, pictures)
        if masked:
            [edited] = [one for one in pictures if not one.role]
            height, width = self._seen(edited)
            _check_size(asked, height, width)
        else:
            height, width = adjusted(params.height or 0, params.width or 0, params.max_area, self.rules.multiple)
        return msgspec.structs.replace(params, height=height, width=width)

    def more(self, params: DiffusionParams, pictures: Sequence[Picture]) -> Payload:
        ordered = sorted(pictures, key=lambda one: one.role != "")
        seen = [(one.image, *self._seen(one)) for one in ordered]
        made = [self._pictures.preprocess(image, height=height, width=width)[0] for image, height, width in seen]
        return {"pictures": made} if made else {}

    def _check_pictures(self, parts: Sequence[MediaPart]) -> None:
        super()._check_pictures([part for part in parts if part.role != REFERENCE])

    def _seen(self, picture: Picture) -> tuple[int, int]:
        """Height and width that the network sees of it. Raises `InvalidRequest`."""
        height, width, multiple = picture.image.height, picture.image.width, self.rules.multiple
        if self._auto_resize:
            return preferred(height, width, multiple)
        if min(height, width) < multiple:
            name = picture.role or "image"
            raise InvalidRequest(
                f"{name} is {width} x {height}; this model sees pictures from {multiple} x {multiple} pixels on",
                field=name,
            )
        return height // multiple * multiple, width // multiple * multiple


def _check_size(asked: DiffusionParams, height: int, width: int) -> None:
    """Raises `InvalidRequest` where another size than that of the picture is asked for."""
    if asked.max_area is not None:
        raise InvalidRequest(
            f"max_area is {asked.max_area}; with a mask, what is made is as large as the picture is seen: leave it out",
            field="max_area",
        )
    for name, given, made in (("height", asked.height, height), ("width", asked.width, width)):
        if given not in (None, made):
            raise InvalidRequest(
                f"{name} is {given}; with a mask, what is made is as large as the picture is seen, {width} x {height}: "
                "leave the size out",
                field=name,
            )
