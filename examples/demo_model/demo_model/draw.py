"""`python -m demo_model.draw train|judge DIRECTORY`: a small pipeline in FLUX.2 Klein's published layout that draws the
scenes of `captions.py` and edits them."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from demo_model.captions import Caption, Edit, is_held_out, random_caption, random_edit, same_things, things_for
from demo_model.pixels import found_in, ground_of, ground_row, paint, painted, random_looks, thing_rows
from demo_model.scenes import SIDE
from segue.models.shared.diffusion.library import LIBRARIES, AutoConfig

LAYERS = (9, 18, 27)
"""Of the text encoder: whose hidden states the pipeline takes."""
TRAINED = (0, 1, 9, 10, 18, 19)
"""Of the text encoder's layers: all that change their input. Training runs no others."""
SHORT, LONG = 64, 512
"""Tokens that a prompt is padded to; the network sees the padding. `LONG` is the pipeline's default."""
WARM_UP = 200
"""Steps in which the learning rate rises."""
DROPPED = 0.1
"""Of the captions: replaced by an empty one, for guidance."""
NOISES = 4
"""With so many levels of noise each picture of a batch is seen."""
_WIDTH, _LATENTS = 64, 16
TEXT: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": max(LAYERS),
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * _LATENTS,
    "num_layers": 2,
    "num_single_layers": 5,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": len(LAYERS) * _WIDTH,
    "timestep_guidance_channels": 128,
    "mlp_ratio": 2.0,
    "axes_dims_rope": (16, 16, 16, 16),
    "guidance_embeds": False,
}
VAE: dict[str, Any] = {
    "block_out_channels": (32, 64, 64, 96),
    "layers_per_block": 1,
    "latent_channels": _LATENTS,
    "norm_num_groups": 8,
    "sample_size": 4 * SIDE,
}
SETTINGS = {"height": SIDE, "width": SIDE, "num_inference_steps": 20, "guidance_scale": 3.0}
"""With which pictures are judged."""
_LIBRARY: Any = LIBRARIES["diffusers"]
PARTS: dict[str, Any] = {
    "text_encoder": LIBRARIES["transformers"].Qwen3ForCausalLM,
    "transformer": _LIBRARY.Flux2Transformer2DModel,
    "vae": _LIBRARY.AutoencoderKLFlux2,
}


def create(directory: Path) -> None:
    """Write everything but the weights."""
    from demo_model.questions import sentences
    from segue.models.images.flux2.tiny import KLEIN_PARTS
    from segue.models.shared.diffusion.tiny import QWEN_SPECIAL, QWEN_TEMPLATE, write_index
    from segue.models.shared.tiny.qwen import write_qwen_tokenizer

    rng = random.Random(0)
    texts = [str(random_caption(rng)) for _ in range(2000)] + [random_edit(rng).text for _ in range(2000)]
    (directory / "tokenizer").mkdir(parents=True, exist_ok=True)
    special = (*QWEN_SPECIAL, "<think>", "</think>")
    texts = [*texts, *sentences()]
    words = write_qwen_tokenizer(directory / "tokenizer", special, (), texts=texts, chat_template=QWEN_TEMPLATE)
    ids = words.get_vocab()
    ends = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    text = AutoConfig.for_model("qwen3", vocab_size=len(ids), pad_token_id=ids["<|endoftext|>"], **ends, **TEXT)
    text.architectures = ["Qwen3ForCausalLM"]
    text.save_pretrained(directory / "text_encoder")
    with torch.device("meta"):
        for name, settings in (("transformer", TRANSFORMER), ("vae", VAE)):
            PARTS[name](**settings).save_config(directory / name)
    _LIBRARY.FlowMatchEulerDiscreteScheduler(shift=2.0).save_pretrained(directory / "scheduler")
    write_index(directory, "Flux2KleinPipeline", KLEIN_PARTS, is_distilled=False)


def networks(directory: Path, seed: int = 0) -> nn.ModuleDict:
    """The pipeline's networks, float32, with the weights that lie there or random ones. The text encoder has the layers
    `TRAINED` alone."""
    torch.manual_seed(seed)
    made = nn.ModuleDict()
    for name, kind in PARTS.items():
        if any((directory / name).glob("*.safetensors")):
            made[name] = kind.from_pretrained(directory / name, dtype=torch.float32)
        elif name == "text_encoder":
            made[name] = kind(AutoConfig.from_pretrained(directory / name))
        else:
            made[name] = kind.from_config(kind.load_config(directory / name))
            for part, module in made[name].named_modules():
                if isinstance(module, nn.Linear) and ("modulation" in part or part in ("norm_out.linear", "proj_out")):
                    nn.init.zeros_(module.weight)  # all blocks begin as the identity
    made["text_encoder"] = _with_layers(made["text_encoder"], TRAINED)
    return made.train()


def _with_layers(text: Any, chosen: Sequence[int | None]) -> Any:
    """A text encoder with copies of these layers of another; None: one that adds nothing to its input."""
    config = deepcopy(text.config)
    config.num_hidden_layers, config.layer_types = len(chosen), config.layer_types[:1] * len(chosen)
    made = PARTS["text_encoder"](config)
    for layer, index in zip(made.model.layers, chosen, strict=True):
        if index is None:
            for weights in (one for name, one in layer.named_parameters() if "proj" in name):
                nn.init.zeros_(weights)
        else:
            layer.load_state_dict(text.model.layers[index].state_dict())
    made.model.embed_tokens.load_state_dict(text.model.embed_tokens.state_dict())
    made.model.norm.load_state_dict(text.model.norm.state_dict())
    return made


def write(directory: Path, trained: nn.ModuleDict) -> None:
    """Write the weights, bfloat16."""
    for name, network in trained.items():
        depth = [TRAINED.index(index) if index in TRAINED else None for index in range(max(LAYERS))]
        whole = _with_layers(network, depth) if name == "text_encoder" else deepcopy(network)
        whole.to("cpu", torch.bfloat16).save_pretrained(directory / name, max_shard_size="15MB")


# data


class Batches(Dataset[dict[str, Tensor]]):
    """Batches by the number of their step: captions with scenes, and in every other step edits, none of them held out.

    `ids` and `mask` [B, tokens], `after` and `before` [B, MOST, 8], `grounds` [B, ...]: what `paint` takes.
    """

    def __init__(self, directory: Path, size: int, steps: range) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
        self.size, self.steps = size, steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step = self.steps[index]
        rng = random.Random(step)
        long = step % 16 > 13
        rows: dict[str, list[Any]] = {"texts": [], "after": [], "before": [], "grounds": []}
        size = self.size // 4 if long else self.size
        looks, clouds = random_looks(step, size)
        while (number := len(rows["texts"])) < size:
            what: Caption | Edit = random_edit(rng) if step % 2 else random_caption(rng)
            if is_held_out(what):
                continue
            if isinstance(what, Edit):
                rows["before"].append(thing_rows(what.before, looks[number]))
                after, ground, plain = what.after, None, False
            else:
                after, ground, plain = things_for(what, rng), what.ground, True
            rows["after"].append(thing_rows(after, looks[number]))
            rows["grounds"].append(ground_row(rng, ground, clouds[number], plain))
            rows["texts"].append("" if rng.random() < DROPPED else _said(rng, str(what)))
        ids, mask = self._encoded(rows.pop("texts"), LONG if long else SHORT)
        return {"ids": ids, "mask": mask, **{name: torch.tensor(values) for name, values in rows.items()}}

    def _encoded(self, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
        """As the pipeline does it: a turn in Qwen 3's format, padded on the right."""
        turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        found = [one.ids for one in self.tokenizer.encode_batch([turn.format(text) for text in texts])]
        ids = torch.full((len(found), length), self.tokenizer.token_to_id("<|endoftext|>"))
        for row, one in zip(ids, found, strict=True):
            row[: len(one)] = torch.tensor(one)
        return ids, torch.arange(length) < torch.tensor([[len(one)] for one in found])


def _said(rng: random.Random, text: str) -> str:
    """With or without a capital and a full stop."""
    return (text[0].upper() + text[1:] if rng.random() < 0.4 else text) + ("." if rng.random() < 0.3 else "")


# what is learned

Loss = Callable[[nn.ModuleDict, dict[str, Tensor], torch.Generator], tuple[Tensor, dict[str, Tensor]]]


def vae_loss(
    made: nn.ModuleDict, batch: dict[str, Tensor], chance: torch.Generator
) -> tuple[Tensor, dict[str, Tensor]]:
    """Reconstruction of pictures without the noise that they are seen with; what has colour counts more."""
    clean = paint(batch["after"], batch["grounds"]) / 127.5 - 1
    spread = made["vae"].encode(_noisy(clean, chance)).latent_dist
    noise = torch.randn(spread.mean.shape, generator=chance, device=clean.device)
    decoded = made["vae"].decode(spread.mean + spread.std * noise).sample.float()
    away = (decoded - clean).abs()
    weight = 1 + 4 * (clean.amax(1, keepdim=True) - clean.amin(1, keepdim=True))
    edges = [(decoded.diff(dim=axis) - clean.diff(dim=axis)).abs().mean() for axis in (2, 3)]
    kl = (spread.mean.float().square() + spread.var.float() - 1 - spread.logvar.float()).mean() / 2
    return (weight * away).mean() + edges[0] + edges[1] + 1e-4 * kl, {"away": away.mean(), "kl": kl}


def flow_loss(
    made: nn.ModuleDict, batch: dict[str, Tensor], chance: torch.Generator
) -> tuple[Tensor, dict[str, Tensor]]:
    """The velocity from pictures to noise, at levels of noise drawn from a logistic normal distribution."""
    vae = made["vae"]
    with torch.no_grad():
        pictures = paint(batch["after"], batch["grounds"]) / 127.5 - 1
        clean = tokens(vae, pictures)
        seen = (
            tokens(vae, _noisy(paint(batch["before"], batch["grounds"]) / 127.5 - 1, chance))
            if len(batch["before"])
            else None
        )
    clean, seen = clean.repeat(NOISES, 1, 1), None if seen is None else seen.repeat(NOISES, 1, 1)
    noise = torch.randn(clean.shape, generator=chance, device=clean.device)
    spread = torch.rand(len(clean), generator=chance, device=clean.device) + torch.arange(
        len(clean), device=clean.device
    )
    level = torch.sigmoid(torch.special.ndtri(spread / len(clean)).clamp(-4, 4) + 0.4)
    mixed = torch.lerp(clean, noise, level[:, None, None])
    [velocity] = made["transformer"](
        hidden_states=mixed if seen is None else torch.cat([mixed, seen], 1),
        encoder_hidden_states=_read(made["text_encoder"], batch["ids"], batch["mask"]).repeat(NOISES, 1, 1),
        timestep=level,
        img_ids=_places(clean.shape[1], 1 if seen is None else 2, clean.device),
        txt_ids=functional.pad(torch.arange(batch["ids"].shape[1], device=clean.device)[:, None], (3, 0)),
        return_dict=False,
    )
    loss = functional.mse_loss(velocity[:, : clean.shape[1]].float(), noise - clean)
    return loss, {"draws" if seen is None else "edits": loss.detach()}


def _read(text: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """[B, tokens, features]: what the pipeline takes of a text encoder that has the layers `TRAINED` alone."""
    before = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    # the library asks the device about a mask of two dimensions, and waits for the answer
    visible = (before & mask[:, None])[:, None]
    states = text.model(input_ids=ids, attention_mask=visible, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[sum(index < layer for index in TRAINED)] for layer in LAYERS], -1)


def tokens(vae: Any, pictures: Tensor) -> Tensor:
    """[B, tokens, features]: latents as the denoiser sees them, two by two, normalised."""
    latents = functional.pixel_unshuffle(vae.encode(pictures).latent_dist.mode().float(), 2)
    mean, std = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    return (latents.flatten(2).mT - mean) / std


def _places(count: int, pictures: int, device: torch.device) -> Tensor:
    """int64 [pictures · count, 4]: picture, row, column and 0 of each token."""
    side, which = torch.arange(math.isqrt(count), device=device), torch.arange(pictures, device=device)
    return torch.cartesian_prod(10 * which, side, side, torch.zeros(1, dtype=torch.long, device=device))


def _noisy(pictures: Tensor, chance: torch.Generator) -> Tensor:
    """Half of the pictures get noise, at most that of `scenes.py`."""
    strength = torch.rand(len(pictures), 1, 1, 1, generator=chance, device=pictures.device)
    noise = torch.randn(pictures.shape, generator=chance, device=pictures.device)
    return (pictures + noise * (2 * strength - 1).clamp(min=0) * 9 / 127.5).clamp(-1, 1)


# training


@dataclass(frozen=True)
class Stage:
    """`parts` are trained; `rate`: the highest learning rate."""

    name: str
    parts: tuple[str, ...]
    loss: Loss
    size: int
    rate: float


VAE_STAGE = Stage("draw-vae", ("vae",), vae_loss, 32, 1e-3)
FLOW_STAGE = Stage("draw-flow", ("text_encoder", "transformer"), flow_loss, 64, 1e-3)


@dataclass(frozen=True)
class Limits:
    """When a stage ends: after so many steps or minutes; the learning rate falls until then. `pause`: steps of one
    call, after which it can be resumed."""

    steps: float = math.inf
    minutes: float = math.inf
    pause: float = math.inf

    def done(self, step: int, seconds: float) -> float:
        """The share of the training that lies behind."""
        return max(step / self.steps, seconds / 60 / self.minutes)


def train(
    made: nn.ModuleDict, stage: Stage, directory: Path, limits: Limits, device: str, workers: int
) -> nn.ModuleDict:
    """Train a stage to its end, from what an earlier call left; returns the moving average of the weights.

    Writes `<name>.pt`, what is needed to resume, and `<name>.jsonl`, the log, into `directory`/training.
    """
    left, log = (directory / "training" / f"{stage.name}.{kind}" for kind in ("pt", "jsonl"))
    left.parent.mkdir(parents=True, exist_ok=True)
    made = made.to(device)
    mean = deepcopy(made).requires_grad_(False)
    for name, part in made.items():
        part.requires_grad_(name in stage.parts)
    learned = [one for name in stage.parts for one in made[name].parameters()]
    averaged = [one for name in stage.parts for one in mean[name].parameters()]
    optimizer = torch.optim.AdamW(learned, lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    first, spent = 0, 0.0
    if left.exists():
        found = torch.load(left, map_location=device, weights_only=True)
        made.load_state_dict(found["weights"])
        mean.load_state_dict(found["mean"])
        optimizer.load_state_dict(found["optimizer"])
        first, spent = found["step"], found["seconds"]
    if limits.done(first, spent) >= 1:
        return mean
    torch.backends.cudnn.benchmark = True
    begun = time.monotonic() - spent
    saved = time.monotonic()
    chance = torch.Generator(device)
    sums: dict[str, list[Tensor]] = {}
    last = int(min(limits.steps, first + limits.pause, 10**7))
    for step, batch in enumerate(_batches(directory, stage.size, range(first, last), device, workers), first):
        done = min(limits.done(step, time.monotonic() - begun), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = stage.rate * min((step + 1) / WARM_UP, 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
        batch = {name: values.to(device, non_blocking=True) for name, values in batch.items()}
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, values = stage.loss(made, batch, chance.manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averaged, learned, 1 - min(0.999, (step + 1) / (step + 10)))
        for name, value in values.items():
            sums.setdefault(name, []).append(value.detach())
        over = step + 1 == last or limits.done(step + 1, time.monotonic() - begun) >= 1
        if (step + 1) % 50 == 0 or over:
            means = {name: round(torch.stack(found).mean().item(), 5) for name, found in sums.items()}
            _log(log, {"step": step + 1, "seconds": round(time.monotonic() - begun, 1), **means})
            sums = {}
        if time.monotonic() - saved > 60 or over:
            state = {"weights": made.state_dict(), "mean": mean.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1, "seconds": time.monotonic() - begun}, left.with_suffix(".new"))
            left.with_suffix(".new").replace(left)
            saved = time.monotonic()
        if over:
            break
    return mean


def _batches(directory: Path, size: int, steps: range, device: str, workers: int) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(
        Batches(directory, size, steps),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=device == "cuda",
    )


@torch.no_grad()
def measure(made: nn.ModuleDict, directory: Path, device: str) -> None:
    """Set the statistics by which latents are normalised."""
    vae = made["vae"].to(device)
    seen = []
    for batch in _batches(directory, 32, range(0, 8, 2), device, 0):
        pictures = paint(batch["after"].to(device), batch["grounds"].to(device)) / 127.5 - 1
        seen.append(functional.pixel_unshuffle(vae.encode(pictures).latent_dist.mode().float(), 2))
    features = torch.cat(seen).transpose(0, 1).flatten(1)
    vae.bn.running_mean.copy_(features.mean(1))
    vae.bn.running_var.copy_(features.var(1))


def _log(path: Path, row: dict[str, float]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(path.stem, row, flush=True)


# what comes of it


@torch.no_grad()
def judge(directory: Path, count: int, device: str, length: int = SHORT) -> dict[str, float]:
    """The share of `count` held-out captions and of as many edits whose pictures, made by the library's pipeline, show
    what they should. Writes the pictures into `directory`/judged. `length`: tokens that a prompt is padded to."""
    pipeline = _LIBRARY.Flux2KleinPipeline.from_pretrained(directory, dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    rng = random.Random("judged")
    (directory / "judged").mkdir(exist_ok=True)
    right = {"draws": 0, "edits": 0}
    makers: dict[str, Callable[[random.Random], Caption | Edit]] = {"draws": random_caption, "edits": random_edit}
    for kind, new in makers.items():
        for number in range(count):
            what = new(rng)
            while not is_held_out(what):
                what = new(rng)
            settings = {**SETTINGS, "max_sequence_length": length, "generator": torch.Generator().manual_seed(number)}
            if isinstance(what, Edit):
                settings["image"] = Image.fromarray(painted(what.before, None, number))
            [image] = pipeline(prompt=str(what), **settings).images
            good = is_right(what, np.asarray(image))
            right[kind] += good
            image.save(
                directory / "judged" / f"{kind}-{number}-{'right' if good else 'wrong'}.png", pnginfo=_note(what)
            )
    return {kind: number / count for kind, number in right.items()}


def is_right(what: Caption | Edit, picture: np.ndarray) -> bool:
    """Whether a picture, uint8 [SIDE, SIDE, 3], shows what a caption says, or what an edit leaves."""
    things = found_in(picture)
    if things is None:
        return False
    if isinstance(what, Edit):
        return same_things(things, what.after)
    return what.is_shown(things) and what.ground in (None, ground_of(picture))


def _note(what: Caption | Edit) -> PngInfo:
    note = PngInfo()
    note.add_text("prompt", str(what))
    return note


def main() -> None:
    parser = argparse.ArgumentParser(prog="demo_model.draw", description=__doc__)
    parser.add_argument("command", choices=["create", "train", "judge"])
    parser.add_argument("directory", type=Path, help="the checkpoint; what is needed to resume lies in its `training`")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of the whole training")
    parser.add_argument("--steps", type=float, default=math.inf, help="of each stage, where there is time enough")
    parser.add_argument("--vae-share", type=float, default=0.3, help="of the minutes; 0 leaves the VAE as it is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=4, help="processes that make data")
    parser.add_argument("--count", type=int, default=100, help="of captions and of edits to judge")
    parser.add_argument("--length", type=int, default=SHORT, help="tokens that judged prompts are padded to")
    options = parser.parse_args()
    directory, device = options.directory, options.device
    if options.command != "judge" and not (directory / "model_index.json").exists():
        create(directory)
    if options.command == "judge":
        print(json.dumps(judge(directory, options.count, device, options.length)))
    if options.command == "train":
        made = networks(directory)
        for stage, share in ((VAE_STAGE, options.vae_share), (FLOW_STAGE, 1 - options.vae_share)):
            if share > 0:
                limits = Limits(options.steps, options.minutes * share)
                made = train(made, stage, directory, limits, device, options.workers)
            if share > 0 and stage is VAE_STAGE:
                measure(made, directory, device)
        write(directory, made)


if __name__ == "__main__":
    main()
