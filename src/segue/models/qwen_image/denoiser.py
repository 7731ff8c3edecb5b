"""The denoiser: a double-stream transformer over text and picture tokens, true classifier-free guidance."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from segue.engines.contract import LoadContext
from segue.engines.diffusion.contract import Row, Sample
from segue.kernels.linear import pack_linears
from segue.messages.diffusion import DiffusionParams
from segue.models.diffusion.denoiser import Denoiser, Given
from segue.models.diffusion.schedulers import set_shifted
from segue.models.diffusion.tuning import PLAIN_ATTENTION
from segue.models.qwen_image.spaces import pixels_per_latent, to_latents, to_tokens

PACKED_ROWS = 256
"""Tokens of a call, roughly, on a CPU: what the weights are laid out for."""
PADDED_TOKENS = 1024
"""From so many latent tokens on, the time per row falls no further in larger calls, and a mask only keeps the attention
from its fastest kernels: there, rows whose texts have other lengths are computed in calls of their own."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """What a request works on (editing): seen in every call behind the picture that is made, and not predicted."""

    tokens: torch.Tensor
    """[1, tokens of all, features]."""
    shapes: tuple[tuple[int, int, int], ...]
    """By picture: 1, and how many tokens down and across."""


class QwenImageDenoiser(Denoiser):
    """`DiffusionAdapter`. Rows of other text lengths share a call: padding is masked out of the attention, and
    positions of text are counted from the picture's size, so that it changes nothing."""

    def __init__(self, ctx: LoadContext) -> None:
        super().__init__(ctx)
        pack_linears(self.network, PACKED_ROWS)
        self._scale = pixels_per_latent(ctx.model_dir)
        self._padded_tokens = PADDED_TOKENS if ctx.attention in PLAIN_ATTENTION else 0
        self._channels: int = self.network.config.in_channels // 4

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        return (1, self._channels, *self._sides(params))

    def packed(self, noise: torch.Tensor, given: Given) -> torch.Tensor:
        return to_tokens(noise)

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> list[torch.Tensor]:
        return set_shifted(scheduler, params, latents.shape[1], self.device)

    def conditions(self, given: Given) -> list[torch.Tensor]:
        """[text tokens, hidden] each."""
        return [text["embeds"].to(self.dtype) for text in given.texts(self.device)]

    def trial_conditions(self, params: DiffusionParams) -> list[torch.Tensor]:
        return [torch.zeros(64, self.network.config.joint_attention_dim, dtype=self.dtype, device=self.device)]

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        shapes = tuple(tuple(picture["latents"].shape) for picture in given.pictures(self.device))
        return (super().bucket_of(latents, given, conditions), shapes)

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        if rows[0].sample.tokens < min(PADDED_TOKENS, self._padded_tokens):
            return self._call(rows)
        lengths = [len(row.condition) for row in rows]
        alike = [[place for place, own in enumerate(lengths) if own == length] for length in dict.fromkeys(lengths)]
        answers: dict[int, torch.Tensor] = {}
        for places in alike:
            answers.update(zip(places, self._call([rows[place] for place in places]), strict=True))
        return [answers[place] for place in range(len(rows))]

    def _call(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        """The network, once; shorter texts are padded."""
        lengths = [len(row.condition) for row in rows]
        text = rows[0].condition.new_zeros(len(rows), max(lengths), rows[0].condition.shape[-1])
        for place, row in enumerate(rows):
            text[place, : lengths[place]] = row.condition
        mask = None
        if min(lengths) < max(lengths):
            mask = (
                torch.arange(max(lengths), device=self.device)[None]
                < torch.tensor(lengths, device=self.device)[:, None]
            )
        height, width = self._sides(rows[0].sample.params)
        timesteps = torch.stack([row.sample.timestep for row in rows]).to(self.device, self.dtype)
        [predictions] = self.network(
            hidden_states=torch.cat([_seen(row.sample) for row in rows]),
            timestep=timesteps / 1000,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, height // 2, width // 2), *_shapes(rows[0].sample)]] * len(rows),
            return_dict=False,
        )
        return predictions[:, : rows[0].sample.latents.shape[1]].split(1)

    def guidance(self, sample: Sample) -> float:
        return sample.params.true_cfg_scale or 1.0

    def combine(self, sample: Sample, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Guided, with each token's norm kept at the prompt's."""
        guided = super().combine(sample, predictions)
        if len(predictions) == 1:
            return guided
        return guided * (predictions[0].norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        return to_latents(latents, *self._sides(sample.params))

    def _samples(self, given: Given, conditions: list[Any]) -> Iterator[Sample]:
        pictures = _pictures(given.pictures(self.device), self.dtype)
        for sample in super()._samples(given, conditions):
            if pictures is not None:
                sample.state = pictures
                sample.tokens += pictures.tokens.shape[1]
            yield sample

    def _sides(self, params: DiffusionParams) -> tuple[int, int]:
        """Height and width in latents."""
        assert params.height is not None
        assert params.width is not None
        return params.height // self._scale, params.width // self._scale


def _pictures(encoded: Sequence[dict[str, torch.Tensor]], dtype: torch.dtype) -> Pictures | None:
    """`encoded`: by picture `latents`, [channels, 1, height, width]."""
    if not encoded:
        return None
    latents = [one["latents"].transpose(0, 1)[None].to(dtype) for one in encoded]
    shapes = tuple((1, one.shape[-2] // 2, one.shape[-1] // 2) for one in latents)
    return Pictures(torch.cat([to_tokens(one) for one in latents], dim=1), shapes)


def _seen(sample: Sample) -> torch.Tensor:
    """The tokens that the network is given of a sample, without its text."""
    pictures: Pictures | None = sample.state
    return sample.latents if pictures is None else torch.cat([sample.latents, pictures.tokens], dim=1)


def _shapes(sample: Sample) -> tuple[tuple[int, int, int], ...]:
    pictures: Pictures | None = sample.state
    return () if pictures is None else pictures.shapes
