"""The plain loop of BAGEL: one request, passage by passage and then token by token, with keys and values kept; or step
by step to an image, after its contexts. `python -m segue.bench.plain.bagel_loop FD OPTIONS` is its process.

H hidden size, n rows of a passage, or tokens of latents, P numbers in a token of latents.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from segue.bench.harness.device import matmul_ceiling
from segue.bench.plain.bagel import WORKLOAD
from segue.bench.plain.comparison import Made, serve
from segue.engines.contract import LoadContext
from segue.messages.diffusion import DiffusionParams
from segue.messages.request import MediaPart, Request
from segue.models.omni.bagel.config import read_config
from segue.models.omni.bagel.decoder import Experts
from segue.models.omni.bagel.drawing.flow import guided, levels
from segue.models.omni.bagel.drawing.settings import Guidance
from segue.models.omni.bagel.loading import load_language_model, load_latent_space, load_vae, load_vision
from segue.models.omni.bagel.prompt import sizes
from segue.models.omni.bagel.vision import patches, places, unpatched
from segue.models.shared.library import AutoTokenizer, DynamicCache

_MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_GUIDANCE = Guidance()


@dataclass
class Context:
    """What the model has read: a text between marks takes a position per token, an image one position."""

    cache: Any = field(default_factory=DynamicCache)
    position: int = 0


class Bagel:
    """`Loop`. The rows of an image see each other, those of a text what is before them."""

    def __init__(self, ctx: LoadContext) -> None:
        self.device = ctx.device
        self.config = read_config(ctx.model_dir)
        self.language = load_language_model(ctx, self.config)
        self.vision = load_vision(ctx, self.config)
        self.space = load_latent_space(ctx, self.config)
        self.vae = load_vae(ctx, self.config)
        self.tokenizer = AutoTokenizer.from_pretrained(ctx.model_dir)
        self.begin, self.end, *self.around = self.tokenizer.convert_tokens_to_ids(list(_MARKS))
        self.ceiling = matmul_ceiling(self.device, torch.float32)
        named = self.language.model.named_parameters()
        self.weights = sum(one.numel() for name, one in named if "_moe_gen" in name and one.ndim == 2)
        """That a row of latents is multiplied with."""

    @torch.inference_mode()
    def __call__(self, request: Request, tokens: int) -> Made:
        if "image" in request.modalities:
            return self._drawn(request)
        context = Context()
        for part in self._parts(request):
            if isinstance(part, Image.Image):
                self._see(context, part)
            else:
                self._append(context, part)
        made = [self.begin]
        while len(made) <= tokens:
            hidden = self._append(context, made[-1:])
            made.append(int(self.language.lm_head(hidden[-1]).argmax()))
        return Made(token_ids=made[1:])

    def _drawn(self, request: Request) -> Made:
        """An image after three contexts: all that is said, the same without the last text, and the texts alone."""
        asked = request.diffusion or DiffusionParams()
        side, steps = asked.height or 0, asked.num_inference_steps or 0
        noise = torch.Generator().manual_seed(request.seed or 0)
        whole, without_text, texts, shown = Context(), Context(), Context(), False
        for part in self._parts(request):
            if isinstance(part, Image.Image):
                self._edit(whole, part, noise)
                self._see(whole, part)
                without_text, shown = copy.deepcopy(whole), True
            else:
                without_text = copy.deepcopy(whole)
                self._append(whole, part)
                self._append(texts, part)
        at = self._places(side, side)
        latents = torch.randn(len(at), self.config.token_channels, generator=noise).to(self.device)
        flops, began = 0.0, time.monotonic()
        for level, after in pairwise(levels(steps).to(self.device)):
            velocity = self._velocity(whole, latents, at, level)
            flops += self._flops(whole, len(at))
            if _GUIDANCE.applies(float(level)):
                no_text = self._velocity(without_text, latents, at, level)
                no_image = self._velocity(texts, latents, at, level) if shown else velocity  # else all is said in texts
                flops += self._flops(without_text, len(at)) + (self._flops(texts, len(at)) if shown else 0.0)
                velocity = guided(velocity, no_text, no_image, _GUIDANCE)
            latents = latents - velocity * (level - after)
        ended, vae, across = time.monotonic(), self.config.vae, side // self.config.token_pixels
        unpacked = unpatched(latents, self.config.latent_patch_size, across, across)
        made = self.vae.decode((unpacked / vae.scale_factor + vae.shift_factor)[None], return_dict=False)[0][0]
        pixels = ((made / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu()
        return Made(image=bytes(pixels.flatten().tolist()), denoised=(began, ended), flops=flops)

    def _velocity(self, context: Context, latents: Tensor, at: Tensor, level: Tensor) -> Tensor:
        """[n, P] → [n, P]. The context is left as it was."""
        position = context.position
        hidden = self._block(context, self.space.rows(latents, at, level), drawn=True)
        context.cache.crop(-len(hidden))
        context.position = position
        return self.space.velocity(hidden[1:-1])

    def _flops(self, context: Context, tokens: int) -> float:
        """Operations of matmuls and attention in one call."""
        llm, rows = self.config.llm, tokens + 2
        attention = 2 * (context.cache.get_seq_length() + rows) * llm.hidden_size * llm.num_hidden_layers
        return 2.0 * rows * (self.weights + attention) + 4.0 * tokens * self.config.token_channels * llm.hidden_size

    def _parts(self, request: Request) -> list[list[int] | Image.Image]:
        """Ids of texts with their marks, and images at the size at which they enter."""
        found: list[list[int] | Image.Image] = []
        for part in (part for message in request.messages for part in message.content):
            if isinstance(part, MediaPart):
                assert part.array is not None, "the workload sends arrays"
                height, width, _ = part.array.shape
                found.append(_scaled(Image.frombytes("RGB", (width, height), part.data), sizes.edited(self.config)))
            else:
                found.append([self.begin, *self.tokenizer.encode(part.text, add_special_tokens=False), self.end])
        return found

    def _edit(self, context: Context, image: Image.Image, noise: torch.Generator) -> None:
        """Append an image as latents of noise level 0."""
        vae, pixels = self.config.vae, self._pixels(image)
        found = self.vae.encode(pixels[None]).latent_dist
        drawn = torch.randn(found.mean.shape[1:], generator=noise).to(self.device)
        latents = (found.mean[0] + found.std[0] * drawn - vae.shift_factor) * vae.scale_factor
        tokens, at = patches(latents, self.config.latent_patch_size), self._places(image.height, image.width)
        self._block(context, self.space.rows(tokens, at, torch.zeros((), device=self.device)), drawn=True)

    def _see(self, context: Context, image: Image.Image) -> None:
        """Append an image as the vision tower sees it."""
        image, size = _scaled(image, sizes.seen(self.config)), self.config.vit.patch_size
        at = places(image.height // size, image.width // size, self.config.vit.side).to(self.device)
        self._block(context, self.vision(patches(self._pixels(image), size)[None], at)[0], drawn=False)

    def _block(self, context: Context, rows: Tensor, *, drawn: bool) -> Tensor:
        """Append the rows of an image between its marks, all at one position; `drawn`: of latents."""
        before, behind = self._embedded(self.around)
        generated = torch.ones(len(rows) + 2, dtype=torch.bool)
        generated[[0, -1]] = False
        at, rows = torch.full((len(rows) + 2,), context.position), torch.cat([before[None], rows, behind[None]])
        return self._run(context, rows, at, causal=False, experts=Experts.of(generated) if drawn else None)

    def _append(self, context: Context, ids: list[int]) -> Tensor:
        """Append tokens of text; their final hidden states [n, H]."""
        at = torch.arange(context.position, context.position + len(ids))
        return self._run(context, self._embedded(ids), at, causal=True, experts=None)

    def _run(self, context: Context, rows: Tensor, at: Tensor, *, causal: bool, experts: Experts | None) -> Tensor:
        seen = context.cache.get_seq_length()
        mask = torch.ones(len(rows), seen + len(rows), dtype=torch.bool, device=self.device)
        out = self.language.model(
            inputs_embeds=rows[None],
            position_ids=at[None].to(self.device),
            attention_mask=(mask.tril(seen) if causal else mask)[None, None],
            past_key_values=context.cache,
            experts=None if experts is None else experts.to(self.device),
        )
        context.position = int(at[-1]) + 1
        return cast(Tensor, out.last_hidden_state[0])

    def _embedded(self, ids: list[int]) -> Tensor:
        return cast(Tensor, self.language.model.embed_tokens(torch.tensor(ids, device=self.device)))

    def _pixels(self, image: Image.Image) -> Tensor:
        levels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).to(self.device)
        return levels.reshape(image.height, image.width, 3).permute(2, 0, 1) / 127.5 - 1

    def _places(self, height: int, width: int) -> Tensor:
        pixels = self.config.token_pixels
        return places(height // pixels, width // pixels, self.config.latent_side).to(self.device)


def _scaled(image: Image.Image, limits: sizes.Limits) -> Image.Image:
    return image.resize(sizes.scaled(*image.size, limits), Image.Resampling.BICUBIC)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], WORKLOAD.kinds, Bagel))
