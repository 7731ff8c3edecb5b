"""The stage models, through which Segue's engines run the networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from segue.engines.contract import LoadContext, Payload
from segue.engines.diffusion.contract import Row, Sample
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest
from segue.messages.request import Request
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser
from segue.models.shared.diffusion.denoiser.given import Given
from segue.models.shared.diffusion.input import DiffusionInput, Rules
from segue.models.shared.diffusion.loading import component_config, load_own
from segue.models.shared.diffusion.transfers import picked
from segue.models.shared.diffusion.vae import Decoder
from segue.models.shared.transfers import whole
from segue_world.family import sizes
from segue_world.networks import Frames, World


class Input(DiffusionInput):
    """Checks a request and fills in its defaults."""

    def __init__(self, ctx: LoadContext) -> None:
        defaults = DiffusionParams(height=64, width=64, num_inference_steps=8, fps=8.0)
        super().__init__(ctx, Rules(defaults, takes=frozenset({"fps", "num_frames"}), sizes=sizes({}, ctx.model_dir)))
        self._numbers = component_config(ctx.model_dir, "transformer")["actions"]

    def process(self, request: Request) -> Payload:
        """The `settings` of `DiffusionInput`, and `actions`: [frames, numbers]."""
        actions = self._actions(request.options.get("actions"))
        asked = request.diffusion or DiffusionParams()
        if asked.seconds is not None or asked.num_frames not in (None, len(actions)):
            raise InvalidRequest(f"options.actions are of {len(actions)} frames: leave it at that", field="num_frames")
        asked = msgspec.structs.replace(asked, num_frames=len(actions))
        return {**super().process(msgspec.structs.replace(request, diffusion=asked)), "actions": actions}

    def _actions(self, rows: object) -> torch.Tensor:
        try:
            actions = torch.tensor(rows, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            actions = torch.empty(0)
        if actions.ndim != 2 or actions.shape[1] != self._numbers or not actions.isfinite().all():
            raise InvalidRequest(
                f"options.actions must be a list with {self._numbers} numbers for each frame", field="options.actions"
            )
        return actions


class WorldDenoiser(Denoiser):
    """Denoises rows of several requests in one call, each at its own timestep."""

    def load(self, ctx: LoadContext, component: str) -> nn.Module:
        return load_own(ctx, component, World)

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        height, width = params.height or 0, params.width or 0  # filled in by the input stage
        return (self.network.enter.in_channels, params.num_frames or 0, height // 4, width // 4)

    def conditions(self, given: Given) -> list[torch.Tensor]:
        [asked] = given.inputs["input"]
        return [asked["actions"].to(self.device, self.dtype)]  # one branch: there is no guidance

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        latents = torch.cat([row.sample.latents for row in rows])
        times = torch.stack([row.sample.timestep for row in rows]).to(latents) / 1000
        return self.network(latents, times, torch.stack([row.condition for row in rows])).split(1)

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        return latents

    def tokens(self, latents: torch.Tensor) -> int:
        return math.prod(latents.shape[2:])

    def decoder_values(self, sample: Sample) -> Payload:
        return {"fps": sample.params.fps}


class WorldDecoder(Decoder):
    """Decodes latents to frames."""

    scale = 4

    def load(self, ctx: LoadContext, component: str) -> nn.Module:
        return load_own(ctx, component, Frames)

    def tile(self, tiled: bool) -> None:
        """Does nothing: the network is small enough without tiles."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.vae(latents)


STAGE_MODELS: dict[str, Any] = {"input": Input, "denoiser": WorldDenoiser, "decoder": WorldDecoder}
TRANSFERS = {("input", "denoiser"): picked("settings", "actions"), ("denoiser", "decoder"): whole}
