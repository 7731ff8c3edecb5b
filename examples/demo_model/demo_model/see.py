"""Teach the model to see and to answer: pictures, clips and questions without either.

First the vision encoder alone learns to tell what lies under each of its tokens; then encoder and language model learn
to answer. All questions about one picture are one sequence: each sees the picture and itself, none sees another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.muon import inside
from demo_model.networks import FRAMES_PER_PATCH, MERGE, PATCH, language_model, seen, vision
from demo_model.questions import JSON, STYLES, Question, about_clip, about_picture, without_picture
from demo_model.scenes import (
    COLOURS,
    DIRECTIONS,
    FRAMES,
    PLACES,
    SHAPES,
    SIDE,
    Canvas,
    Scene,
    canvas,
    draw_alike,
    draw_clip,
    draw_scene,
    moments,
    painted,
)
from demo_model.training import Part

TOKEN = PATCH * MERGE
"""Pixels of a picture's side that one token stands for."""
GRID = SIDE // TOKEN
KINDS = ("picture", "clip", "picture", "picture", "nothing")
"""Of the steps' batches, in turn."""
ALIKE = 0.4
"""Of the training's pictures: in so many are several things alike."""
_IGNORED = -100
_BALANCE = 0.01
"""Weight of the loss that keeps the experts evenly used (Switch Transformers, section 2.2)."""
_ALIGNED = 32
"""Sequences of a batch are filled up to a multiple of so many tokens: fewer sizes of memory to find."""


@dataclass(frozen=True)
class Answers:
    """Sequences of one picture, clip or nothing each, and questions about it.

    `kind`: for the log. `drawn`: their frames, in order. `ids`, `branches`: int64 [sequences, tokens]; a branch is 0
    for what all questions see, then the number of the question, and -1 where a sequence is filled up. `positions`:
    int64 [3, sequences, tokens]. `asked`: int64 [answers' tokens], where in `ids`, flattened, the token before each
    lies; `targets`: the tokens.
    """

    kind: str
    drawn: Canvas | None
    ids: Tensor
    branches: Tensor
    positions: Tensor
    asked: Tensor
    targets: Tensor


class Sequences:
    """Makes batches of `Answers`. `kinds`: "picture", "clip", "nothing", of which each step takes one in turn."""

    def __init__(self, model_dir: Path, size: int, kinds: Sequence[str], questions: int, seed: int = 0) -> None:
        self.model_dir, self.size, self.kinds, self.questions, self.seed = model_dir, size, kinds, questions, seed

    def __call__(self, step: int) -> Answers:
        kind, made = self.made(random.Random(f"{self.seed}/{step}"), step)
        return self.batch(kind, made)

    def made(self, rng: random.Random, step: int) -> tuple[str, list[Asked]]:
        """A step's kind and questions; the style of answers is the same for all, since their lengths differ by it."""
        kind, style = self.kinds[step % len(self.kinds)], rng.choice(["", *STYLES])
        count = max(self.questions // 2, 1) if style == JSON else self.questions
        return kind, [asked(kind, rng, count, style, harder=True) for _ in range(self.size)]

    def batch(self, kind: str, made: Sequence[Asked]) -> Answers:
        """Sequences of one kind as tensors."""
        sequences = [sequence(self.model_dir, kind, style, questions) for _, style, questions in made]
        longest = -(-max(len(one.ids) for one in sequences) // _ALIGNED) * _ALIGNED
        labels = torch.stack([_padded(one.labels, longest, _IGNORED) for one in sequences]).flatten()
        [asks] = (labels != _IGNORED).nonzero(as_tuple=True)
        scenes = [scene for scene, _, _ in made if scene is not None]
        return Answers(
            kind,
            canvas(scenes) if scenes else None,
            ids=torch.stack([_padded(one.ids, longest, 0) for one in sequences]),
            branches=torch.stack([_padded(one.branch, longest, -1) for one in sequences]),
            positions=torch.stack([_padded(one.positions, longest, 0) for one in sequences], 1),
            asked=asks - 1,
            targets=labels[asks],
        )


Asked = tuple[Scene | None, str, list[Question]]
"""What is to be seen, the style of the answers, and questions."""


def asked(kind: str, rng: random.Random, count: int, style: str | None = None, *, harder: bool = False) -> Asked:
    """Something to see and `count` questions about it, without a style in a random one. `harder`: see
    `about_picture`."""
    style = rng.choice(["", *STYLES]) if style is None else style
    if kind == "nothing":
        return None, style, without_picture(rng, style or "full", count)
    if kind == "clip":
        scene = draw_clip(rng)
        return scene, style, about_clip(scene, rng, style or "full", count)
    scene = draw_alike(rng) if harder and rng.random() < ALIKE else draw_scene(rng)
    return scene, style, about_picture(scene, rng, style or "full", count, harder=harder)


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
        positions = (after + torch.arange(len(ids))).expand(3, -1)
        parts.append((ids, labels, positions, torch.full_like(ids, number)))
    return _Sequence(*(torch.cat(column, -1) for column in zip(*parts, strict=True)))


@cache
def _tokenizer(model_dir: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@lru_cache(100_000)
def encode(model_dir: Path, text: str) -> Tensor:
    """int64 [tokens]."""
    return torch.tensor(_tokenizer(model_dir).encode(text).ids)


@cache
def prefix(model_dir: Path, kind: str, style: str) -> tuple[Tensor, Tensor]:
    """Ids and positions [3, tokens] of a prompt up to where the question begins."""
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
    return ids, positions[:, 0].long()


def _padded(values: Tensor, length: int, filler: int) -> Tensor:
    return functional.pad(values, (0, length - values.shape[-1]), value=filler)


def visible(branches: Tensor) -> Tensor:
    """[sequences, tokens] → bool [sequences, 1, tokens, tokens]: a token sees what all see and its own branch, up to
    itself."""
    same = (branches[:, :, None] == branches[:, None]) | (branches[:, None] == 0)
    return same.tril()[:, None]


def answer_loss(model: Any, batch: Answers, step: int, heard: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of the answers' tokens. `heard`: what the audio encoder gives of spoken questions, in order."""
    config, text = model.config.thinker_config, language_model(model)
    rows = text.embed_tokens(batch.ids)
    deep, pads = None, None
    if batch.drawn is not None:
        frames = painted(batch.drawn)
        found = seen(model, frames.unflatten(0, (len(batch.ids), -1)))
        pads = (batch.ids == config.image_token_id) | (batch.ids == config.video_token_id)
        rows = rows.masked_scatter(pads[..., None], found.pooler_output.to(rows.dtype))
        deep = found.deepstack_features
    if heard is not None:
        rows = rows.masked_scatter((batch.ids == config.audio_token_id)[..., None], heard.to(rows.dtype))
    made = text(
        inputs_embeds=rows,
        position_ids=batch.positions,
        attention_mask=visible(batch.branches),
        visual_pos_masks=pads,
        deepstack_visual_embeds=deep,
        use_cache=False,
        output_router_logits=True,
    )
    logits = model.thinker.lm_head(made.last_hidden_state.flatten(0, 1).index_select(0, batch.asked)).float()
    loss = functional.cross_entropy(logits, batch.targets)
    right = (logits.argmax(-1) == batch.targets).float().mean()
    name = f"spoken {batch.kind}" if heard is not None else batch.kind
    return loss + _BALANCE * _unevenness(made.router_logits), {f"{name} loss": loss, f"{name} right": right}


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
    """Pictures, or pairs of a clip's frames, and what lies under each of their tokens. `things`: int64 [tokens, 5]:
    colour, shape, size, movement and place of the thing whose centre is there, or -100."""

    drawn: Canvas
    things: Tensor


class Labels(nn.Module):
    """Tells from a token's features whether a thing's centre is there, and which one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sorts = {"colour": 1 + len(COLOURS), "shape": len(SHAPES), "size": 2, "movement": 1 + len(DIRECTIONS)}
        self.sorts["place"] = len(PLACES)
        self.head = nn.Linear(width, sum(self.sorts.values()))

    def loss(self, features: Tensor, things: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses, values = [], {}
        each = self.head(features).float().split(list(self.sorts.values()), -1)
        for name, logits, wanted in zip(self.sorts, each, things.unbind(-1), strict=True):
            losses.append(functional.cross_entropy(logits, wanted))
            known = (wanted > 0) if name == "colour" else wanted >= 0
            values[f"{name} right"] = ((logits.argmax(-1) == wanted) & known).sum() / known.sum()
        return torch.stack(losses).sum(), values


def cells(step: int, size: int = 96, seed: int = 0) -> Cells:
    """A batch of pictures, or, every fourth, of clips: as many pairs of frames."""
    rng = random.Random(f"cells/{seed}/{step}")
    pairs = FRAMES // FRAMES_PER_PATCH
    if step % 4 == 3:
        scenes = [draw_clip(rng) for _ in range(max(size // pairs, 1))]
    else:
        scenes = [draw_scene(rng, 2, 7) for _ in range(size)]
    return Cells(canvas(scenes), torch.cat([_things(scene) for scene in scenes]))


def _things(scene: Scene) -> Tensor:
    """int64 [pairs of frames · GRID², 5], of the tokens row by row."""
    frames = moments(scene)
    pairs = [(frames[first], frames[min(first + 1, len(frames) - 1)]) for first in range(0, len(frames), 2)]
    found = torch.full((len(pairs), GRID, GRID, 5), _IGNORED)
    found[..., 0] = 0
    for number, pair in enumerate(pairs):
        for thing, later in zip(*pair, strict=True):
            x, y = (thing.x + later.x) / 2, (thing.y + later.y) / 2
            row, column = min(int(y) // TOKEN, GRID - 1), min(int(x) // TOKEN, GRID - 1)
            move = (_sign(later.x - thing.x), _sign(later.y - thing.y))
            moved = 1 + list(DIRECTIONS.values()).index(move) if move != (0, 0) else 0
            colour, shape = list(COLOURS).index(thing.colour), SHAPES.index(thing.shape)
            place = min(int(3 * y / SIDE), 2) * 3 + min(int(3 * x / SIDE), 2)
            found[number, row, column] = torch.tensor([1 + colour, shape, int(thing.size == "big"), moved, place])
    return found.flatten(0, 2)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def encoder_part(model: Any, *, size: int = 96) -> Part:
    """Trains the vision encoder."""
    labels = Labels(model.config.thinker_config.vision_config.out_hidden_size)

    def loss(batch: Cells, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        frames = painted(batch.drawn)
        pairs = frames[:, None] if step % 4 < 3 else frames.unflatten(0, (-1, FRAMES_PER_PATCH))
        return labels.loss(seen(model, pairs).pooler_output, batch.things)

    return Part(
        "vision",
        [vision(model)],
        partial(cells, size=size),
        loss,
        own=labels,
        rate=2e-3,
        slow=[vision(model).patch_embed],
        matrices=inside(vision(model).blocks, vision(model).merger, vision(model).merger_list)[0],
        matrix_rate=0.005,
    )


def answers_part(model: Any, model_dir: Path, *, size: int = 32, questions: int = 8) -> Part:
    """Trains the language model, and the vision encoder slowly: at first it would only lose what it has learned."""
    text = read_as_drawn(model)
    matrices, stacks = inside(text.layers)
    return Part(
        "answers",
        [vision(model), text, model.thinker.lm_head],
        Sequences(model_dir, size, KINDS, questions),
        partial(answer_loss, model),
        rate=1.5e-3,
        slow=[vision(model)],
        matrices=matrices,
        stacks=stacks,
        matrix_rate=0.004,
    )


def read_as_drawn(model: Any) -> Any:
    """The language model, whose embeddings of tokens stay what `create` has drawn: audio encoder and talker learn from
    them at the same time."""
    text = language_model(model)
    text.embed_tokens.requires_grad_(False)
    return text
