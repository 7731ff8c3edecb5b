"""The stage models: how Segue's engines call the parts of the author's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from action_video import ActionVideoForGeneration

from segue.engines.contract import LoadContext
from segue.models.shared.own_model.decoder import OwnDecoder, Placeholder, codes_of_turn
from segue.models.shared.own_model.frames import CodesToFrames
from segue.models.shared.own_model.input import FrameInput
from segue.models.shared.own_model.loading import load_author
from segue.models.shared.transfers import whole
from segue_action_video.family import graph


class Input(FrameInput):
    """Images to codes, by the author's tokenizer."""

    def load(self, ctx: LoadContext) -> Any:
        model = load_author(ctx, ActionVideoForGeneration)
        config = model.config
        self.spec = graph(config.to_dict()).tensors["actions"]
        self.placeholder = config.action_token_id
        self.size = (config.image_size, config.image_size)
        return model.image_tokenizer

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.network.encode(pixels)


class Trunk(OwnDecoder):
    """Draws the codes of a frame after its actions."""

    decoder, head = "trunk", "head"

    def load(self, ctx: LoadContext) -> Any:
        model = load_author(ctx, ActionVideoForGeneration)
        model.image_tokenizer = None  # it is in the other stages
        return model

    @property
    def placeholders(self) -> Mapping[str, Placeholder]:
        config = self.network.config
        return {"actions": Placeholder(config.action_token_id, (config.action_size,))}

    @property
    def turn_tokens(self) -> int:
        return self.network.config.tokens_per_frame

    def embed_run(self, ids: torch.Tensor, start: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.network.embed(ids, tensors["actions"], start)

    def embed_flat(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        model, step = self.network, self.network.config.tokens_per_step
        return model.trunk.embed_tokens(ids) + model.space(places % step) + model.time(places // step)


class Frames(CodesToFrames):
    """Codes to pixels."""

    def load(self, ctx: LoadContext) -> Any:
        model = load_author(ctx, ActionVideoForGeneration)
        self.codes_per_frame = model.config.tokens_per_frame
        return model.image_tokenizer

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return self.network.decode(codes)


STAGE_MODELS = {"input": Input, "trunk": Trunk, "frames": Frames}
TRANSFERS = {("input", "trunk"): whole, ("trunk", "frames"): codes_of_turn}
