"""The denoiser: one transformer over patches of a video's latents, or two experts for successive timestep ranges."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn

from segue.engines.contract import Payload
from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.kernels.prepare import prepared_bytes
from segue.messages.diffusion import DiffusionParams
from segue.models.images.wan.shape import TEXT_TOKENS, Shape
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser
from segue.models.shared.diffusion.denoiser.given import Given
from segue.models.shared.diffusion.denoiser.tuning import load_network


@dataclass(frozen=True, slots=True)
class Condition:
    """The conditions of one branch."""

    text: torch.Tensor
    """[max_sequence_length, hidden]: zero-padded after the prompt, as in training."""
    latents: torch.Tensor | None = None
    """[1, channels, frames, h, w]: the result of `VaeEncoder`, if there are images."""
    looks: torch.Tensor | None = None
    """[images, tokens, hidden]: the result of `ImageEncoder`."""


class WanDenoiser(Denoiser):
    """`DiffusionModel`; latents are [1, channels, frames, h, w]. All rows of a call use the same expert."""

    noise_dtype: ClassVar[torch.dtype | None] = torch.float32
    read = frozenset({"condition_embedder.time_embedder.linear_1", "condition_embedder.time_embedder.linear_2"})

    def __init__(self, ctx: DenoiserContext) -> None:
        super().__init__(ctx)
        self._shape = Shape.of(ctx.model_dir)
        self.second: nn.Module | None = None
        if self._shape.boundary is not None:
            self.second = load_network(ctx, "transformer_2", self.read)
            self.weight_bytes += held_bytes(self.second) + prepared_bytes(self.second)

    def networks(self) -> Sequence[nn.Module]:
        return [self.network] if self.second is None else [self.network, self.second]

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        return self._shape.latents(params)

    def tokens(self, latents: torch.Tensor) -> int:
        frames, height, width = (
            side // patch for side, patch in zip(latents.shape[2:], self._shape.patch, strict=True)
        )
        return frames * height * width

    def conditions(self, given: Given) -> list[Condition]:
        latents = looks = None
        if "vae_encoder" in given.inputs:
            [found] = given.images(self.device)
            latents = found["latents"][None]
        if "image_encoder" in given.inputs:
            [seen] = given.encoded(self.device, "image_encoder", "looks")
            looks = seen["embeds"].to(self.dtype)
        return [Condition(self._padded(text["embeds"], given), latents, looks) for text in given.texts(self.device)]

    def trial_params(self) -> list[DiffusionParams]:
        longest = {"num_frames": 1, "max_sequence_length": TEXT_TOKENS}
        return [msgspec.structs.replace(params, **longest) for params in super().trial_params()]

    def trial_conditions(self, params: DiffusionParams) -> list[Condition]:
        text = torch.zeros(TEXT_TOKENS, self.network.config.text_dim, dtype=self.dtype, device=self.device)
        _, frames, height, width = self._shape.latents(params)
        added = self.network.config.in_channels - self._shape.channels
        latents = torch.zeros(1, added, frames, height, width, device=self.device) if added else None
        looks = None
        if self._shape.looks:
            shape = (self._shape.images[1], self._shape.seen, self.network.config.image_dim)
            looks = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return [Condition(text, latents, looks)]

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Condition]) -> Hashable:
        return (tuple(latents.shape), len(conditions[0].text))

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> Sequence[torch.Tensor]:
        # on the CPU: the next expert is determined before each step
        scheduler.set_timesteps(params.num_inference_steps, device="cpu")
        scheduler.set_begin_index(0)  # rounded timesteps may be equal, which a search by timestep would confuse
        return list(scheduler.timesteps)

    def bucket(self, sample: Sample) -> Hashable:
        return (sample.bucket, self._is_second(sample))

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        network = self.second if self._is_second(rows[0].sample) else self.network
        assert network is not None
        looks = [row.condition.looks for row in rows if row.condition.looks is not None]
        [predictions] = network(
            hidden_states=torch.cat([self._seen(row) for row in rows]).to(self.dtype),
            timestep=torch.stack([self._timestep(row) for row in rows]),
            encoder_hidden_states=torch.stack([row.condition.text for row in rows]),
            encoder_hidden_states_image=torch.cat(looks) if looks else None,
            return_dict=False,
        )
        return predictions.split(1)

    def guidance(self, sample: Sample) -> float:
        first, second = sample.params.guidance_scale, sample.params.guidance_scale_2
        chosen = second if second is not None and self._is_second(sample) else first
        assert chosen is not None
        return chosen

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        given = sample.conditions[0].latents
        if given is None or not self._shape.timestep_per_token:
            return latents
        return torch.cat([given, latents[:, :, 1:]], dim=2)

    def decoder_values(self, sample: Sample) -> Payload:
        return {"fps": sample.params.fps}

    def _is_second(self, sample: Sample) -> bool:
        """Whether the second expert runs the next step."""
        return self._shape.boundary is not None and bool(sample.timestep < self._shape.boundary)

    def _padded(self, embeds: torch.Tensor, given: Given) -> torch.Tensor:
        longest = given.params.max_sequence_length
        assert longest is not None
        text = torch.zeros(longest, embeds.shape[-1], dtype=self.dtype, device=self.device)
        text[: len(embeds)] = embeds
        return text

    def _seen(self, row: Row) -> torch.Tensor:
        """A sample's network input: its latents with the image latents appended as channels, or replacing the first
        frame."""
        latents, given = row.sample.latents, row.condition.latents
        if given is None:
            return latents
        if self._shape.timestep_per_token:
            return torch.cat([given, latents[:, :, 1:]], dim=2)
        return torch.cat([latents, given], dim=1)

    def _timestep(self, row: Row) -> torch.Tensor:
        """A row's timestep: a number, or [tokens], 0 for the tokens of given frames."""
        timestep = row.sample.timestep.to(self.device, torch.float32)
        if not self._shape.timestep_per_token:
            return timestep
        tokens = timestep.repeat(self.tokens(row.sample.latents))
        if row.condition.latents is not None:
            tokens[: self.tokens(row.condition.latents)] = 0
        return tokens
