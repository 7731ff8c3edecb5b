"""A plain, slow, unbatched run of a BAGEL checkpoint over Segue's networks: what serving must give, whatever it shares.

A context is a sequence of text and images, as keys and values. Noise comes from one generator per request: first that
of the images that are edited, in order, then that of the latents.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedTokenizerBase

from segue.engines.contract import LoadContext
from segue.models.omni.bagel.config import Config, read_config
from segue.models.omni.bagel.decoder import Experts
from segue.models.omni.bagel.drawing.flow import guided, levels
from segue.models.omni.bagel.drawing.settings import Guidance
from segue.models.omni.bagel.loading import load_language_model, load_latent_space, load_vae, load_vision
from segue.models.omni.bagel.prompt import sizes
from segue.models.omni.bagel.vision import patches, places, unpatched

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
STORY = CASES.pop("story")
"""Texts and images by turns."""


@dataclass
class Sequence:
    """What the model has seen."""

    cache: DynamicCache = field(default_factory=DynamicCache)
    position: int = 0
    """The rotary position of what comes next: tokens of text take one each, an image takes one."""

    @property
    def length(self) -> int:
        return int(self.cache.get_seq_length())

    def copied(self) -> Sequence:
        return Sequence(copy.deepcopy(self.cache), self.position)


@dataclass
class Drawn:
    velocities: Tensor
    """[evaluations, n, P], guided."""
    latents: Tensor
    """[n, P]."""
    pixels: Tensor
    """[3, height, width] in about [-1, 1]."""


class Bagel:
    def __init__(self, model_dir: Path) -> None:
        ctx = LoadContext(model_dir, "reference", torch.device("cpu"), torch.float32)
        self.config: Config = read_config(model_dir)
        self.language = load_language_model(ctx, self.config)
        self.vision = load_vision(ctx, self.config)
        self.space = load_latent_space(ctx, self.config)
        self.vae = load_vae(ctx, self.config)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir)
        marks = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
        self.begin, self.end, *self.around = (self.tokenizer.convert_tokens_to_ids(mark) for mark in marks)

    def read(self, sequence: Sequence, text: str) -> None:
        """Append a text, causally."""
        ids = [self.begin, *self.tokenizer.encode(text), self.end]
        self._append(sequence, self._embedded(ids))

    @torch.no_grad()
    def edit(self, sequence: Sequence, image: Tensor, noise: torch.Generator) -> None:
        """Append an image [3, height, width] in [-1, 1] as latents of noise level 0."""
        size = self.config.latent_patch_size
        encoded = self.vae.encode(image[None]).latent_dist.sample(noise)[0]
        tokens = patches((encoded - self.config.vae.shift_factor) * self.config.vae.scale_factor, size)
        at = self._latent_places(*image.shape[1:])
        self._block(sequence, self.space.rows(tokens, at, torch.tensor(0.0)), drawn=True)

    @torch.no_grad()
    def see(self, sequence: Sequence, image: Tensor) -> None:
        """Append an image [3, height, width] in [-1, 1] as the vision tower sees it."""
        size = self.config.vit.patch_size
        at = places(image.shape[1] // size, image.shape[2] // size, self.config.vit.side)
        self._block(sequence, self.vision(patches(image, size)[None], at)[0], drawn=False)

    @torch.no_grad()
    def answer(self, sequence: Sequence, most: int) -> tuple[list[int], Tensor]:
        """(ids, logits [steps, vocab]) of a greedy reply, with the mark that begins it and without the one that ends
        it. `sequence` is left as it was."""
        sequence = sequence.copied()
        ids, logits = [self.begin], []
        while True:
            hidden = self._append(sequence, self._embedded(ids[-1:]))
            logits.append(self.language.lm_head(hidden)[-1])
            drawn = int(logits[-1].argmax())
            if drawn == self.end or len(ids) == most:
                return ids, torch.stack(logits)
            ids.append(drawn)

    @torch.no_grad()
    def draw(
        self,
        sequence: Sequence,
        without_text: Sequence,
        without_image: Sequence,
        size: tuple[int, int],
        steps: int,
        guidance: Guidance,
        noise: torch.Generator,
    ) -> Drawn:
        """An image of `size` (height, width) after `sequence`, guided by the other two."""
        at = self._latent_places(*size)
        latents = torch.randn(len(at), self.config.token_channels, generator=noise)
        velocities = []
        for level, after in pairwise(levels(steps)):
            velocity = self._velocity(sequence, latents, at, level)
            if guidance.applies(float(level)):
                no_text = self._velocity(without_text, latents, at, level)
                no_image = self._velocity(without_image, latents, at, level) if guidance.image > 1.0 else None
                velocity = guided(velocity, no_text, no_image, guidance)
            velocities.append(velocity)
            latents = latents - velocity * (level - after)
        return Drawn(torch.stack(velocities), latents, self.decoded(latents, size))

    def decoded(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """[n, P] → pixels [3, height, width]."""
        down, across = (side // self.config.token_pixels for side in size)
        whole = unpatched(latents, self.config.latent_patch_size, down, across)
        vae = self.config.vae
        return self.vae.decode((whole / vae.scale_factor + vae.shift_factor)[None], return_dict=False)[0][0]

    def edited(self, image: Image.Image) -> Image.Image:
        """An image at the size at which it enters."""
        return image.resize(sizes.scaled(*image.size, sizes.edited(self.config)), Image.Resampling.BICUBIC)

    def seen(self, image: Image.Image) -> Image.Image:
        """An image of `edited` at the size at which the vision tower sees it."""
        return image.resize(sizes.scaled(*image.size, sizes.seen(self.config)), Image.Resampling.BICUBIC)

    def _velocity(self, sequence: Sequence, latents: Tensor, at: Tensor, level: Tensor) -> Tensor:
        hidden = self._block(sequence.copied(), self.space.rows(latents, at, level), drawn=True)
        return self.space.velocity(hidden[1:-1])

    def _latent_places(self, height: int, width: int) -> Tensor:
        pixels = self.config.token_pixels
        return places(height // pixels, width // pixels, self.config.latent_side)

    def _embedded(self, ids: list[int]) -> Tensor:
        return self.language.model.embed_tokens(torch.tensor(ids))

    def _block(self, sequence: Sequence, rows: Tensor, *, drawn: bool) -> Tensor:
        """Append the rows of an image between its marks, all of which see each other and have one position."""
        before, behind = self._embedded(self.around)
        rows = torch.cat([before[None], rows, behind[None]])
        generated = torch.ones(len(rows), dtype=torch.bool)
        generated[[0, -1]] = False
        mask = torch.ones(len(rows), sequence.length + len(rows), dtype=torch.bool)
        at = torch.full((len(rows),), sequence.position)
        return self._run(sequence, rows, at, mask, generated if drawn else None)

    def _append(self, sequence: Sequence, rows: Tensor) -> Tensor:
        """Append rows of text, each of which sees those before it."""
        mask = torch.ones(len(rows), sequence.length + len(rows), dtype=torch.bool).tril(sequence.length)
        at = torch.arange(sequence.position, sequence.position + len(rows))
        return self._run(sequence, rows, at, mask, None)

    @torch.no_grad()
    def _run(self, sequence: Sequence, rows: Tensor, at: Tensor, mask: Tensor, generated: Tensor | None) -> Tensor:
        """Append rows [n, H] at positions [n] that see the keys of `mask` [n, keys]; their final hidden states."""
        made = self.language.model(
            inputs_embeds=rows[None],
            position_ids=at[None],
            attention_mask=mask[None, None],
            past_key_values=sequence.cache,
            experts=None if generated is None else Experts.of(generated),
        )
        sequence.position = int(at[-1]) + 1
        hidden: Tensor = made.last_hidden_state[0]
        return hidden


def pixels(image: Image.Image) -> Tensor:
    """[3, height, width] in [-1, 1]."""
    values = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return values.reshape(image.height, image.width, 3).permute(2, 0, 1) / 127.5 - 1


def picture(width: int, height: int) -> Image.Image:
    """As `make_golden.py` has it."""
    across, down = torch.arange(width), torch.arange(height)[:, None]
    channels = [(3 * across + down) % 256, (across + 5 * down) % 256, (across * down) % 256]
    return Image.frombytes("RGB", (width, height), bytes(torch.stack(channels, -1).to(torch.uint8).flatten().tolist()))


@dataclass
class Done:
    """What came of a case."""

    ids: list[int]
    """Of a reply, or of thoughts."""
    thoughts: str = ""
    logits: Tensor | None = None
    """Of a reply."""
    drawn: Drawn | None = None


@dataclass
class Told:
    """What came of a story."""

    texts: list[list[int]]
    """Ids of each, with the mark that begins it and without the one that ends it."""
    drawn: list[Drawn]


def told(reference: Bagel, case: dict[str, Any], most: int) -> Told:
    """Texts and images by turns. `most`: tokens of a text, its first mark included."""
    noise = torch.Generator().manual_seed(case["seed"])
    whole, without_image, without_text = Sequence(), Sequence(), Sequence()
    made = Told([], [])
    if "image" in case:
        image = reference.edited(picture(*case["image"]))
        reference.edit(whole, pixels(image), noise)
        reference.see(whole, pixels(reference.seen(image)))
        without_text = whole.copied()
    reference.read(whole, case["text"])
    reference.read(without_image, case["text"])
    for number in range(case["images"] + 1):
        ids, _ = reference.answer(whole, most)
        made.texts.append(ids)
        if number < case["images"]:
            text = reference.tokenizer.decode(ids[1:])
            reference.read(whole, text)
            guidance, size = Guidance(**case["guidance"]), tuple(case["size"])
            drawn = reference.draw(whole, without_text, without_image, size, case["steps"], guidance, noise)
            made.drawn.append(drawn)
            reference.read(without_image, text)
            image = reference.edited(shown(drawn.pixels))
            reference.edit(whole, pixels(image), noise)
            reference.see(whole, pixels(reference.seen(image)))
            without_text = whole.copied()
    return made


def shown(pixels: Tensor) -> Image.Image:
    """[3, height, width] in about [-1, 1] → the image that a client gets."""
    levels = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    height, width = levels.shape[1:]
    return Image.frombytes("RGB", (width, height), bytes(levels.permute(1, 2, 0).flatten().tolist()))


def carried_out(reference: Bagel, case: dict[str, Any], most: int) -> Done:
    """Carry out a case (`CASES`) from an empty sequence on. `most`: tokens of a text."""
    noise = torch.Generator().manual_seed(case.get("seed", 0))
    whole, without_image = Sequence(), Sequence()
    size = tuple(case.get("size", ()))
    if case.get("think"):
        reference.read(whole, case["think"])
        reference.read(without_image, case["think"])
    if "image" in case:
        image = reference.edited(picture(*case["image"]))
        if case["task"] == "draw":
            reference.edit(whole, pixels(image), noise)
        reference.see(whole, pixels(reference.seen(image)))
        size = image.size[::-1]
    without_text = whole.copied()
    reference.read(whole, case["text"])
    reference.read(without_image, case["text"])
    if case["task"] == "answer":
        ids, logits = reference.answer(whole, most)
        return Done(ids, logits=logits)
    done = Done([])
    if case.get("think"):
        done.ids, _ = reference.answer(whole, most)
        done.thoughts = reference.tokenizer.decode(done.ids[1:])
        reference.read(whole, done.thoughts)
    guidance = Guidance(**case["guidance"])
    done.drawn = reference.draw(whole, without_text, without_image, size, case["steps"], guidance, noise)
    return done
