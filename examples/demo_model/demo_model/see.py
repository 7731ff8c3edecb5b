"""Teach the model to see and to answer: pictures, clips and questions without either.

First the vision encoder alone learns to tell what lies under each of its tokens; then encoder and language model learn
to answer. All questions about one picture are one sequence: each sees the picture and itself, none sees another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.networks import audio_encoder, language_model, vision
from demo_model.questions import STYLES, Question, about_clip, about_picture, without_picture
from demo_model.scenes import COLOURS, SHAPES, SIDE, Scene, clip, draw_clip, draw_scene, picture
from demo_model.training import Part

PATCH, MERGE, FRAMES_PER_PATCH = 16, 2, 2
TOKEN = PATCH * MERGE
"""Pixels of a picture's side that one token stands for."""
GRID = SIDE // TOKEN
KINDS = ("picture", "picture", "picture", "clip", "nothing")
"""Of the steps' batches, in turn."""
_IGNORED = -100
_BALANCE = 0.01
"""Weight of the loss that keeps the experts evenly used (Switch Transformers, section 2.2)."""


@dataclass(frozen=True)
class Answers:
    """Sequences of one picture, clip or nothing each, and questions about it.

    `pixels`: float32 [patches, 1536], empty without media. `ids`, `labels`: int64 [sequences, tokens]. `positions`:
    int64 [4, sequences, tokens]. `mask`: bool [sequences, 1, tokens, tokens], true where a token is seen. Of spoken
    questions, `mels`: float32 [mel bins, all spectra], and `lengths`: spectra of each.
    """

    pixels: Tensor
    grids: Tensor
    ids: Tensor
    labels: Tensor
    positions: Tensor
    mask: Tensor
    mels: Tensor | None = None
    lengths: Tensor | None = None


def patches(frames: np.ndarray) -> np.ndarray:
    """uint8 [frames, SIDE, SIDE, 3] → float32 [patches, 1536], as the library's processor gives them. One frame counts
    for two."""
    if len(frames) == 1:
        frames = np.repeat(frames, FRAMES_PER_PATCH, 0)
    values = frames.astype(np.float32) / 127.5 - 1
    size = (len(frames) // FRAMES_PER_PATCH, FRAMES_PER_PATCH, GRID, MERGE, PATCH, GRID, MERGE, PATCH, 3)
    return values.reshape(size).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * FRAMES_PER_PATCH * PATCH**2)


class Sequences:
    """Makes batches of `Answers`. `kinds`: "picture", "clip", "nothing", of which each step takes one in turn."""

    def __init__(self, model_dir: Path, size: int, kinds: Sequence[str], questions: int, seed: int = 0) -> None:
        self.model_dir, self.size, self.kinds, self.questions, self.seed = model_dir, size, kinds, questions, seed

    def __call__(self, step: int) -> Answers:
        rng = random.Random(f"{self.seed}/{step}")
        kind = self.kinds[step % len(self.kinds)]
        return self.batch(kind, [asked(kind, rng, self.questions) for _ in range(self.size)])

    def batch(self, kind: str, made: Sequence[Asked]) -> Answers:
        """Sequences of one kind as tensors."""
        frames = [pixels for pixels, _, _ in made if pixels is not None]
        sequences = [sequence(self.model_dir, kind, style, questions) for _, style, questions in made]
        longest = max(len(one.ids) for one in sequences)
        grid = [len(frames[0]) // FRAMES_PER_PATCH or 1, SIDE // PATCH, SIDE // PATCH] if frames else []
        return Answers(
            pixels=torch.from_numpy(np.concatenate([patches(one) for one in frames])) if frames else torch.empty(0),
            grids=torch.tensor([grid] * len(frames)),
            ids=torch.stack([_padded(one.ids, longest, 0) for one in sequences]),
            labels=torch.stack([_padded(one.labels, longest, _IGNORED) for one in sequences]),
            positions=torch.stack([_padded(one.positions, longest, 0) for one in sequences], 1),
            mask=torch.stack([_mask(one.branch, longest) for one in sequences]),
        )


Asked = tuple[np.ndarray | None, str, list[Question]]
"""Frames (or None), the style of the answers, and questions."""


def asked(kind: str, rng: random.Random, count: int) -> Asked:
    """Something to see and `count` questions about it."""
    style = rng.choice(["", *STYLES])
    if kind == "nothing":
        return None, style, without_picture(rng, style or "full", count)
    scene = draw_clip(rng) if kind == "clip" else draw_scene(rng)
    if kind == "clip":
        return clip(scene), style, about_clip(scene, rng, style or "full", count)
    return picture(scene)[None], style, about_picture(scene, rng, style or "full", count)


@dataclass(frozen=True)
class _Sequence:
    """`branch`: int64 [tokens], 0 for what all questions see, then the number of the question."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    branch: Tensor


def sequence(model_dir: Path, kind: str, style: str, questions: Sequence[Question]) -> _Sequence:
    """One prefix with its questions as branches of it."""
    ids, positions = prefix(model_dir, kind, style)
    after = int(positions.max()) + 1
    parts = [(ids, torch.full_like(ids, _IGNORED), positions, torch.zeros_like(ids))]
    for number, question in enumerate(questions, 1):
        asks = encode(model_dir, f"{question.text}<|im_end|>\n<|im_start|>assistant\n")
        says = encode(model_dir, f"{question.answer}<|im_end|>")
        ids = torch.cat([asks, says])
        labels = torch.cat([torch.full_like(asks, _IGNORED), says])
        positions = (after + torch.arange(len(ids))).expand(4, -1)
        parts.append((ids, labels, positions, torch.full_like(ids, number)))
    return _Sequence(*(torch.cat(column, -1) for column in zip(*parts, strict=True)))


@cache
def _tokenizer(model_dir: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def encode(model_dir: Path, text: str) -> Tensor:
    return torch.tensor(_tokenizer(model_dir).encode(text).ids)


@cache
def prefix(model_dir: Path, kind: str, style: str) -> tuple[Tensor, Tensor]:
    """Ids and positions [4, tokens] of a prompt up to where the question begins."""
    from transformers import AutoConfig

    from segue.models.omni.qwen3_omni.library import Qwen3OmniMoeThinkerForConditionalGeneration

    system = f"<|im_start|>system\n{STYLES[style]}<|im_end|>\n" if style else ""
    count = {"picture": GRID**2, "clip": 4 * GRID**2, "nothing": 0}[kind]
    pad = {"picture": "<|image_pad|>", "clip": "<|video_pad|>", "nothing": ""}[kind]
    media = f"<|vision_start|>{pad * count}<|vision_end|>" if count else ""
    ids = encode(model_dir, f"{system}<|im_start|>user\n{media}")
    config = AutoConfig.from_pretrained(model_dir).thinker_config
    with torch.device("meta"):
        thinker = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    frames = count // GRID**2
    grid = torch.tensor([[frames, SIDE // PATCH, SIDE // PATCH]])
    given = {"picture": {"image_grid_thw": grid}, "clip": {"video_grid_thw": grid, "second_per_grids": torch.ones(1)}}
    index = getattr(thinker, "get_rope_index", None) or thinker.model.get_rope_index
    positions, _ = index(ids[None], attention_mask=torch.ones_like(ids[None]), **given.get(kind, {}))
    positions = positions[:, 0].long()
    return ids, torch.cat([positions[:1], positions])


def _padded(values: Tensor, length: int, filler: int) -> Tensor:
    return functional.pad(values, (0, length - values.shape[-1]), value=filler)


def _mask(branch: Tensor, length: int) -> Tensor:
    """bool [1, length, length]: a token sees the prefix and its own branch, up to itself."""
    branch = _padded(branch, length, -1)
    same = (branch[:, None] == branch[None]) | (branch[None] == 0)
    return torch.tril(same | torch.eye(length, dtype=torch.bool))[None]


def answer_loss(model: Any, batch: Answers) -> tuple[Tensor, dict[str, float]]:
    """Cross entropy of the answers' tokens."""
    thinker = model.thinker
    text = language_model(model)
    rows = text.embed_tokens(batch.ids)
    deep, seen = None, None
    if len(batch.pixels):
        found = vision(model)(batch.pixels, grid_thw=batch.grids)
        pads = [thinker.config.image_token_id, thinker.config.video_token_id]
        seen = torch.isin(batch.ids, torch.tensor(pads))
        rows = rows.masked_scatter(seen[..., None], found.pooler_output)
        deep = found.deepstack_features
    if batch.mels is not None:
        heard = audio_encoder(model)(batch.mels, feature_lens=batch.lengths).last_hidden_state
        rows = rows.masked_scatter((batch.ids == thinker.config.audio_token_id)[..., None], heard)
    made = text(
        inputs_embeds=rows,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        visual_pos_masks=seen,
        deepstack_visual_embeds=deep,
        use_cache=False,
        output_router_logits=True,
    )
    answers = batch.labels[:, 1:] != _IGNORED
    logits = thinker.lm_head(made.last_hidden_state[:, :-1][answers])
    targets = batch.labels[:, 1:][answers]
    loss = functional.cross_entropy(logits, targets)
    right = (logits.argmax(-1) == targets).float().mean().item()
    kind = "nothing" if seen is None else "clip" if batch.grids[0, 0] > 1 else "picture"
    kind += "" if batch.mels is None else "_spoken"
    return loss + _BALANCE * _unevenness(made.router_logits), {f"{kind}_loss": loss.item(), f"{kind}_right": right}


def _unevenness(router_logits: Sequence[Tensor]) -> Tensor:
    """1 where each layer's experts get equal shares of the tokens, more where not."""
    found = []
    for logits in router_logits:
        shares = torch.softmax(logits, -1)
        chosen = functional.one_hot(shares.topk(2, -1).indices, logits.shape[-1]).float().sum(1).mean(0) / 2
        found.append(logits.shape[-1] * (chosen * shares.mean(0)).sum())
    return torch.stack(found).mean()


# the vision encoder alone


@dataclass(frozen=True)
class Cells:
    """Pictures and what lies under each of their tokens. `things`: int64 [tokens, 3], colour, shape and size of the
    thing whose centre is there, or -100."""

    pixels: Tensor
    grids: Tensor
    things: Tensor


class Labels(nn.Module):
    """Tells from a token's features whether a thing's centre is there, and which one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sorts = [1 + len(COLOURS), len(SHAPES), 2]
        self.head = nn.Linear(width, sum(self.sorts))

    def loss(self, features: Tensor, things: Tensor) -> tuple[Tensor, dict[str, float]]:
        losses, values = [], {}
        for name, logits, wanted in zip(
            ("colour", "shape", "size"), self.head(features).split(self.sorts, -1), things.unbind(-1), strict=True
        ):
            losses.append(functional.cross_entropy(logits, wanted))
            known = (wanted > 0) if name == "colour" else wanted >= 0
            values[f"{name}_right"] = (logits.argmax(-1) == wanted)[known].float().mean().item()
        return torch.stack(losses).sum(), values


def cells(step: int, size: int = 96, seed: int = 0) -> Cells:
    """A batch of pictures."""
    rng = random.Random(f"cells/{seed}/{step}")
    scenes = [draw_scene(rng, 2, 7) for _ in range(size)]
    pixels = np.concatenate([patches(picture(scene)[None]) for scene in scenes])
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * size)
    return Cells(torch.from_numpy(pixels), grid, torch.cat([_things(scene) for scene in scenes]))


def _things(scene: Scene) -> Tensor:
    """int64 [GRID², 3], of the tokens row by row."""
    found = torch.full((GRID, GRID, 3), _IGNORED)
    found[..., 0] = 0
    for thing in scene.things:
        row, column = min(int(thing.y) // TOKEN, GRID - 1), min(int(thing.x) // TOKEN, GRID - 1)
        colour, shape = list(COLOURS).index(thing.colour), SHAPES.index(thing.shape)
        found[row, column] = torch.tensor([1 + colour, shape, int(thing.size == "big")])
    return found.reshape(-1, 3)


def encoder_part(model: Any) -> Part:
    """Trains the vision encoder."""
    labels = Labels(model.config.thinker_config.vision_config.out_hidden_size)

    def loss(batch: Cells, step: int) -> tuple[Tensor, dict[str, float]]:
        features = vision(model)(batch.pixels, grid_thw=batch.grids).pooler_output
        return labels.loss(features, batch.things)

    return Part("vision", [vision(model), labels], cells, loss)


def answers_part(model: Any, model_dir: Path, *, size: int = 32, questions: int = 6) -> Part:
    """Trains vision encoder and language model together."""
    thinker = model.thinker
    modules = [vision(model), thinker.model, thinker.lm_head]
    sequences = Sequences(model_dir, size, KINDS, questions)
    return Part("answers", modules, sequences, lambda batch, step: answer_loss(model, batch))
