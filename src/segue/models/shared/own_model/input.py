"""The input stage of a model whose sequence is frames, and items of a named tensor between them: a frame, an item, the
next frame, and so on. After each item beyond the given frames the model draws a frame.

Every such item is a piece of its own, whether it came with the request, was appended later, or is of a request that
goes on from an earlier one: the result cannot depend on that."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import msgspec
import numpy as np
import torch

from segue.engines.contract import LoadContext, Payload
from segue.media.image import decode_image
from segue.media.limits import DecodeBudget, MediaLimits
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, wrong
from segue.messages.request import MediaPart, Message, Request
from segue.messages.tensors import TensorSpec, items_of, tensor_part
from segue.messages.units import ids_of
from segue.models.shared.input_stage import InputStage
from segue.models.shared.own_model.decoder import MODALITIES, TENSORS

_NO_SETTINGS = DiffusionParams()


class FrameInput(InputStage):
    """Takes frames (images) and items of one tensor. Option: `limits`, a dict of `MediaLimits` fields."""

    goes_on = True

    spec: TensorSpec
    """The tensor of the items, as the graph declares it."""
    placeholder: int
    """The id of its tokens."""
    size: tuple[int, int]
    """Height and width of a frame."""

    def __init__(self, ctx: LoadContext) -> None:
        self._limits = MediaLimits.from_options(ctx.options.get("limits", {}))
        self.budget: DecodeBudget | None = self._limits.budget
        self.network = self.load(ctx)

    @abstractmethod
    def load(self, ctx: LoadContext) -> Any:
        """The network, on `ctx.device` in `ctx.dtype`; sets `spec`, `placeholder` and `size`."""

    @abstractmethod
    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[n, 3, height, width] in [-1, 1] → [n, codes of a frame] long."""

    def warm_up(self) -> None:
        """Encode one frame."""
        self._codes(np.zeros((1, *self.size, 3), dtype=np.uint8))

    def pieces(self, request: Request, *, appended: bool) -> list[Request]:
        """The frames with the items between them; then each further item, after which a frame is drawn."""
        frames, items = self._given(request)
        name = self.spec.name
        if appended and (frames or not items):
            raise InvalidRequest(f"a piece holds no {name}; append {name} alone", field="append")
        if request.earlier and (frames or not items):
            raise InvalidRequest(
                f"previous is set; the frame that was drawn last is followed by {name}: send at least one item, and "
                "no image",
                field="messages",
            )
        if not appended and not frames and not request.earlier:
            raise InvalidRequest("messages hold no image; the model goes on from at least one", field="messages")
        least = max(0, len(frames) - request.open)
        if not appended and len(items) < least:
            raise InvalidRequest(
                f"messages hold {len(items)} items of {name} for {len(frames)} images; the model needs at least "
                f"{least}: one after each image" + (" but the last" if request.open else ""),
                field="messages",
            )
        between = max(0, len(frames) - 1)
        made = [] if appended else [_piece(request, [*frames, *items[:between]], reply=False)]
        made += [_piece(request, [item], reply=True) for item in items[between:]]
        made[-1] = msgspec.structs.replace(made[-1], open=request.open)
        return made

    def process(self, request: Request) -> Payload:
        """The payload of the frames, those drawn in reply to earlier requests among them, and of the items between
        them."""
        _check_settings(request)
        codes: list[torch.Tensor] = []
        between: list[MediaPart] = []
        for one, units in [*((one.request, one.units) for one in request.earlier), (request, [])]:
            frames, items = self._given(one)
            if frames:
                codes += self._codes(np.stack([self._pixels(part) for part in frames])).unbind()
            if units:
                codes += torch.tensor(ids_of(units)).split(len(codes[0]))
            between += items
        marks = torch.full((self.spec.tokens,), self.placeholder)
        ids = torch.cat([part for frame in codes for part in (marks, frame)][1:])
        return self._payload(ids, between, {"image": sum(map(len, codes))})

    def process_appended(self, request: Request) -> Payload:
        """The payload of an item."""
        _, items = self._given(request)
        return self._payload(torch.full((self.spec.tokens,), self.placeholder), items, {})

    def _payload(self, ids: torch.Tensor, items: list[MediaPart], tokens: dict[str, int]) -> Payload:
        payload: Payload = {"token_ids": ids, MODALITIES: tokens}
        if items:
            rows = np.concatenate([items_of(part, self.spec) for part in items])
            rows = rows.reshape(-1, *rows.shape[2:]) if self.spec.tokens > 1 else rows
            payload[TENSORS] = {self.spec.name: torch.from_numpy(rows.copy())}
            tokens[self.spec.name] = len(items) * self.spec.tokens
        return payload

    def _given(self, request: Request) -> tuple[list[MediaPart], list[MediaPart]]:
        """The frames and the items, a part for each. Raises `InvalidRequest` for anything else."""
        for field in ("prompt", "prompt_token_ids", "prompt_embeds"):
            if (value := getattr(request, field)) is not None:
                raise wrong(field, value, f"left out: this model takes images and {self.spec.name}, in messages")
        frames: list[MediaPart] = []
        items: list[MediaPart] = []
        for number, message in enumerate(request.messages):
            for place, part in enumerate(message.content):
                at = f"messages[{number}].content[{place}]"
                if isinstance(part, MediaPart) and part.kind == self.spec.name:
                    items += [tensor_part(item, part.kind, part.field) for item in items_of(part, self.spec)]
                elif isinstance(part, MediaPart):
                    frames.append(part)
                elif part.text or part.embeds is not None:
                    raise InvalidRequest(f"{at} is text; this model takes images and {self.spec.name}", field=at)
        self._limits.check_items(len(frames), "messages")
        return frames, items

    def _pixels(self, part: MediaPart) -> np.ndarray:
        pixels = decode_image(part, self._limits)
        if pixels.shape[:2] != self.size:
            height, width = pixels.shape[:2]
            right = f"{self.size[1]} × {self.size[0]}"
            raise InvalidRequest(f"{part.field} is {width} × {height} pixels; it must be {right}", field=part.field)
        return pixels

    @torch.inference_mode()
    def _codes(self, frames: np.ndarray) -> torch.Tensor:
        """[n, height, width, 3] uint8 → [n, codes], on the CPU."""
        weight = next(self.network.parameters())
        pixels = torch.from_numpy(frames).movedim(-1, 1).to(weight.device, weight.dtype) / 127.5 - 1
        return self.encode(pixels).cpu()


def _piece(request: Request, parts: list[MediaPart], *, reply: bool) -> Request:
    """A piece after which more follows."""
    return msgspec.structs.replace(request, messages=[Message("user", list(parts))], open=True, reply=reply)


def _check_settings(request: Request) -> None:
    """Raise `InvalidRequest` for settings of diffusion models; `progress` has no effect."""
    asked = request.diffusion or _NO_SETTINGS
    for field in DiffusionParams.__struct_fields__:
        if field != "progress" and getattr(asked, field) != getattr(_NO_SETTINGS, field):
            raise wrong(field, getattr(asked, field), "left out: this model has no such setting")
