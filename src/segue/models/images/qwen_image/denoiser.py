"""The denoiser: a double-stream transformer over text and image tokens, true classifier-free guidance."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from segue.engines.diffusion.contract import DenoiserContext, Row, Sample
from segue.kernels.graphs.replay import is_replayed
from segue.kernels.prepare import prepared_bytes
from segue.messages.diffusion import DiffusionParams
from segue.models.images.qwen_image.folded import fold, foldable
from segue.models.images.qwen_image.graph import EDITING, pixels_per_latent
from segue.models.images.qwen_image.spaces import to_latents, to_tokens
from segue.models.shared.diffusion.denoiser.denoiser import Denoiser
from segue.models.shared.diffusion.denoiser.given import Given
from segue.models.shared.diffusion.denoiser.schedulers import set_shifted
from segue.models.shared.diffusion.denoiser.sequence_parallel import rows_of_one_length
from segue.models.shared.diffusion.denoiser.tuning import PLAIN_ATTENTION
from segue.models.shared.diffusion.latents import sides_of
from segue.models.shared.diffusion.loading import pipeline_index

_TEXT_STEP = 16
"""Text lengths are rounded up to a multiple of this where calls are replayed from captured graphs."""
_TRIAL_TEXT = 61
"""Text tokens of a trial; differs from every image's token count, because equal lengths would be compiled as one."""


@dataclass(frozen=True, slots=True)
class Images:
    """The images that a request edits: in every call their tokens follow the output image's, without a prediction."""

    tokens: torch.Tensor
    """[1, tokens of all, features]."""
    shapes: tuple[tuple[int, int, int], ...]
    """By image: 1, and the number of token rows and columns."""


class QwenImageDenoiser(Denoiser):
    """`DiffusionModel`. Rows with different text lengths share a call: attention masks the padding, and text positions
    are counted from the image's size, so that padding changes nothing."""

    padded_tokens: ClassVar[int] = 1024
    """From this many latent tokens on, larger calls no longer reduce the time per row, and a mask only prevents the
    fastest attention kernels: then rows with different text lengths run in separate calls."""

    def __init__(self, ctx: DenoiserContext) -> None:
        super().__init__(ctx)
        if foldable(ctx):
            before = prepared_bytes(self.network)
            fold(self.network, keep_modulations=ctx.lora is None)
            self.weight_bytes += prepared_bytes(self.network) - before
        self._scale = pixels_per_latent(ctx.model_dir)
        masks = ctx.attention in PLAIN_ATTENTION and not rows_of_one_length(ctx)
        captured = self.device.type == "cuda" and is_replayed(self.network)
        # with a mask the library copies a number to the device, which a CUDA graph does not allow
        self._padded_tokens = self.padded_tokens if masks and not captured else 0
        # on a CPU masks are free, while every distinct text length would be captured anew
        self._text_step = _TEXT_STEP if masks and self.device.type == "cpu" and is_replayed(self.network) else 1
        self._edits = pipeline_index(ctx.model_dir).get("_class_name") in EDITING
        self._channels: int = self.network.config.in_channels // 4

    def noise_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        return (1, self._channels, *self._sides(params))

    def packed(self, noise: torch.Tensor, given: Given) -> torch.Tensor:
        return to_tokens(noise)

    def set_timesteps(self, scheduler: Any, latents: torch.Tensor, params: DiffusionParams) -> list[torch.Tensor]:
        return set_shifted(scheduler, params, latents.shape[1], self.device, always=True)

    def begins_with(self, given: Given) -> dict[str, torch.Tensor] | None:
        """Only with a mask: otherwise the edited image is a condition and the output begins with noise."""
        if self._edits and given.mask is None:
            return None
        return next(iter(given.images(self.device)), None)

    def other_tokens(self, sample: Sample) -> int:
        return max(map(len, sample.conditions))

    def conditions(self, given: Given) -> list[torch.Tensor]:
        """Prompt embeddings, [text tokens, hidden] each."""
        return [text["embeds"].to(self.dtype) for text in given.texts(self.device)]

    def trial_conditions(self, params: DiffusionParams) -> list[torch.Tensor]:
        return [torch.zeros(_TRIAL_TEXT, self.network.config.joint_attention_dim, dtype=self.dtype, device=self.device)]

    def compiled_calls(self, sample: Sample) -> Iterator[list[Row]]:
        """Also compiles texts of different lengths, which add a mask."""
        yield from super().compiled_calls(sample)
        shorter = replace(sample, conditions=[condition[1:] for condition in sample.conditions])
        yield [Row(sample, 0), Row(shorter, 0)]

    def bucket_of(self, latents: torch.Tensor, given: Given, conditions: Sequence[Any]) -> Hashable:
        seen = given.images(self.device) if self._edits else []
        shapes = tuple(tuple(image["mean"].shape) for image in seen)
        return (super().bucket_of(latents, given, conditions), shapes)

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        if rows[0].sample.tokens < self._padded_tokens:
            return self._call(rows, self._text_step)
        lengths = [len(row.condition) for row in rows]
        alike = [[place for place, own in enumerate(lengths) if own == length] for length in dict.fromkeys(lengths)]
        answers: dict[int, torch.Tensor] = {}
        for places in alike:
            answers.update(zip(places, self._call([rows[place] for place in places]), strict=True))
        return [answers[place] for place in range(len(rows))]

    def _call(self, rows: Sequence[Row], step: int = 1) -> Sequence[torch.Tensor]:
        """Run the network once; texts are padded to one length, a multiple of `step`."""
        lengths = [len(row.condition) for row in rows]
        longest = -(-max(lengths) // step) * step
        text = rows[0].condition.new_zeros(len(rows), longest, rows[0].condition.shape[-1])
        for place, row in enumerate(rows):
            text[place, : lengths[place]] = row.condition
        mask = None
        if min(lengths) < longest:
            mask = torch.arange(longest, device=self.device)[None] < torch.tensor(lengths, device=self.device)[:, None]
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
        """Apply guidance, rescaled to the norm of the prompt's prediction for each token."""
        guided = super().combine(sample, predictions)
        if len(predictions) == 1:
            return guided
        return guided * (predictions[0].norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def unpacked(self, sample: Sample, latents: torch.Tensor) -> torch.Tensor:
        return to_latents(latents, *self._sides(sample.params))

    def _samples(self, given: Given, conditions: list[Any]) -> Iterator[Sample]:
        seen = given.images(self.device) if self._edits else []
        images = _images(seen, self.dtype)
        for sample in super()._samples(given, conditions):
            # the library's pipeline with a mask conditions on the drawn latents
            if images is not None and given.start is not None:
                images = Images(given.start.image, images.shapes)
            if images is not None:
                sample.state = images
                sample.given = images.tokens.shape[1]
                sample.tokens += sample.given
            yield sample

    def _sides(self, params: DiffusionParams) -> tuple[int, int]:
        """Height and width in latents."""
        return sides_of(params, self._scale)


def _images(encoded: Sequence[dict[str, torch.Tensor]], dtype: torch.dtype) -> Images | None:
    """`encoded`: `mean` of each image, [1, channels, height, width]."""
    if not encoded:
        return None
    latents = [one["mean"][None].to(dtype) for one in encoded]
    shapes = tuple((1, one.shape[-2] // 2, one.shape[-1] // 2) for one in latents)
    return Images(torch.cat([to_tokens(one) for one in latents], dim=1), shapes)


def _seen(sample: Sample) -> torch.Tensor:
    """A sample's image tokens for the network, without its text."""
    images: Images | None = sample.state
    return sample.latents if images is None else torch.cat([sample.latents, images.tokens], dim=1)


def _shapes(sample: Sample) -> tuple[tuple[int, int, int], ...]:
    images: Images | None = sample.state
    return () if images is None else images.shapes
