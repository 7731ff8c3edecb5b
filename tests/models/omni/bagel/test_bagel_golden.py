"""The networks give what the public reference gives, for each thing that the model does: `golden/make_golden.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from bagel_reference import CASES, GOLDEN, STORY, Bagel, Sequence, Told, carried_out, told
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from segue.models.omni.bagel.drawing.flow import guided, levels
from segue.models.omni.bagel.drawing.settings import Guidance
from segue.models.omni.bagel.prompt import sizes
from segue.models.omni.bagel.vision import patches, places, unpatched

WITHIN = 2e-4
EVERY = 11
"""Of the numbers of an image, those that are recorded."""
MOST = 60
"""Tokens of a reply."""


@cache
def recorded() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@dataclass
class Made:
    """What the model made of one case, and how far it is from what is recorded."""

    ids: list[int]
    thoughts: str
    apart: float


def run(reference: Bagel, name: str, **changes: Any) -> Made:
    """A case, from an empty sequence on. `changes`: of its settings."""
    case = {**CASES[name], **changes}
    done = carried_out(reference, case, MOST)
    if done.logits is not None:
        gold = recorded()[f"{name}.logits"]
        return Made(done.ids, "", _apart(done.logits[: len(gold)], gold))
    drawn = done.drawn
    assert drawn is not None
    pairs = {"velocities": drawn.velocities, "latents": drawn.latents, "pixels": drawn.pixels.flatten()[::EVERY]}
    apart = max(_apart(ours, recorded()[f"{name}.{key}"]) for key, ours in pairs.items())
    return Made(done.ids, done.thoughts, apart)


def _apart(ours: torch.Tensor, gold: torch.Tensor) -> float:
    return float((ours - gold).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_the_model_does_what_the_reference_does(reference: Bagel, name: str) -> None:
    made = run(reference, name)
    assert made.apart < WITHIN
    if CASES[name]["task"] == "answer":
        assert made.ids == recorded()[f"{name}.ids"].tolist()
        assert len(made.ids) < MOST  # it ended by itself
    assert made.thoughts == json.loads((GOLDEN / "golden.json").read_text())["thoughts"].get(name, "")


TEXTS = 40
"""Tokens of each text of a story, as in `make_golden.py`."""


def apart_in(told_: Told) -> float:
    """How far the images of a story are from what is recorded."""
    pairs = [
        (ours, recorded()[f"story.{kind}.{number}"])
        for number, drawn in enumerate(told_.drawn)
        for kind, ours in (("velocities", drawn.velocities), ("pixels", drawn.pixels.flatten()[::EVERY]))
    ]
    return max(_apart(ours, gold) for ours, gold in pairs)


def test_texts_and_images_by_turns(reference: Bagel) -> None:
    made = told(reference, STORY, TEXTS)
    assert made.texts == [recorded()[f"story.ids.{number}"].tolist() for number in range(3)]
    lengths = list(map(len, made.texts))
    assert TEXTS in lengths, "one is cut"
    assert min(lengths) > 3
    assert lengths[-1] < TEXTS, "others end"
    assert apart_in(made) < WITHIN
    again = told(reference, {**STORY, "seed": 6}, TEXTS)
    assert apart_in(again) > 10 * WITHIN
    assert again.texts[0] == made.texts[0]
    assert again.texts[1:] != made.texts[1:], "it has seen another image"


@contextmanager
def louder(part: torch.nn.Module) -> Iterator[None]:
    """Within it, one part of a network gives more than it should."""
    hook = part.register_forward_hook(lambda module, given, out: 1.5 * out)
    try:
        yield
    finally:
        hook.remove()


AGAIN = pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("look", "vision.vit_pos_embed"),
        ("draw", "language.model.layers.1.mlp_moe_gen"),
        ("draw", "language.model.layers.2.input_layernorm"),  # of the marks
        ("draw", "space.time_embedder"),
        pytest.param("chat", "language.model.layers.1.self_attn.k_norm", marks=AGAIN),
        pytest.param("chat", "language.model.layers.2.mlp", marks=AGAIN),
        pytest.param("look", "vision.encoder.layers.1.self_attn.out_proj", marks=AGAIN),
        pytest.param("look", "vision.embeddings.position_embedding", marks=AGAIN),
        pytest.param("draw", "language.model.layers.0.self_attn.q_norm_moe_gen", marks=AGAIN),
        pytest.param("draw", "language.model.norm_moe_gen", marks=AGAIN),
        pytest.param("draw", "space.latent_pos_embed", marks=AGAIN),
        pytest.param("draw", "vae.decoder.mid_block.attentions.0.to_v", marks=AGAIN),
        pytest.param("edit", "vae.encoder.down_blocks.1.resnets.0.conv2", marks=AGAIN),
        pytest.param("edit", "vision.connector.fc2", marks=AGAIN),
    ],
)
def test_every_part_counts(reference: Bagel, name: str, part: str) -> None:
    owner, _, rest = part.partition(".")
    networks = {"language": reference.language, "vision": reference.vision, "space": reference.space}
    with louder(networks.get(owner, reference.vae).get_submodule(rest)):
        assert run(reference, name).apart > 10 * WITHIN


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("look", {"image": [96, 50]}),
        ("draw", {"seed": 4}),
        ("edit", {"seed": 4}),
        pytest.param("chat", {"text": "What is the sea like at nights?"}, marks=AGAIN),
        pytest.param("draw", {"text": "A red boat on a calm river"}, marks=AGAIN),
        pytest.param("edit", {"image": [60, 91]}, marks=AGAIN),
        pytest.param("think", {"think": ""}, marks=AGAIN),
        pytest.param("draw", {"guidance": {**CASES["draw"]["guidance"], "above": 0.0}}, marks=AGAIN),
        pytest.param("draw", {"guidance": {**CASES["draw"]["guidance"], "renorm": "channel"}}, marks=AGAIN),
    ],
)
def test_every_input_counts(reference: Bagel, name: str, changes: dict[str, Any]) -> None:
    assert run(reference, name, **changes).apart > 10 * WITHIN


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Positions, mask and latents of what is appended."""


def _causal(at: torch.Tensor, mask: torch.Tensor, generated: torch.Tensor | None) -> Rows:
    return at, mask.tril(mask.shape[1] - mask.shape[0]), generated


def _a_position_each(at: torch.Tensor, mask: torch.Tensor, generated: torch.Tensor | None) -> Rows:
    return at[0] + torch.arange(len(at)), mask, generated


def _marks_as_latents(at: torch.Tensor, mask: torch.Tensor, generated: torch.Tensor | None) -> Rows:
    return at, mask, None if generated is None else torch.ones_like(generated)


def _one_expert(at: torch.Tensor, mask: torch.Tensor, generated: torch.Tensor | None) -> Rows:
    return at, mask, None


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", [_causal, _a_position_each, _marks_as_latents, _one_expert])
def test_a_block_run_another_way_is_noticed(reference: Bagel, wrong: Callable[..., Rows]) -> None:
    class Wrong(Bagel):
        def __init__(self) -> None:
            vars(self).update(vars(reference))

        def _run(
            self,
            sequence: Sequence,
            rows: torch.Tensor,
            at: torch.Tensor,
            mask: torch.Tensor,
            generated: torch.Tensor | None,
        ) -> torch.Tensor:
            return super()._run(sequence, rows, *wrong(at, mask, generated))

    assert run(Wrong(), "draw").apart > 10 * WITHIN


def test_the_model_is_called_once_less_than_there_are_levels() -> None:
    torch.testing.assert_close(levels(5), torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0]))
    torch.testing.assert_close(levels(3, 1.0), torch.tensor([1.0, 0.5, 0.0]))
    assert len(recorded()["draw.velocities"]) == CASES["draw"]["steps"] - 1
    assert [Guidance().applies(level) for level in (1.0, 0.41, 0.4, 0.0)] == [True, True, False, False]
    assert not Guidance(text=1.0).applies(0.9)


@given(st.sampled_from(["global", "channel", "text_channel"]), st.floats(1.1, 8.0), st.integers(0, 99))
def test_guidance_never_makes_a_velocity_larger(renorm: Any, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    velocity, no_text, no_image = torch.randn(3, 6, 4, generator=generator)
    guidance = Guidance(text=scale, image=scale, renorm=renorm)
    over = None if renorm == "global" else -1
    without = no_image if renorm != "text_channel" else None
    made = guided(velocity, no_text, without, guidance)
    before, after = (torch.linalg.vector_norm(of, dim=over) for of in (velocity, made))
    assert bool((after <= before * (1 + 1e-5)).all())
    torch.testing.assert_close(guided(velocity, velocity, velocity, guidance), velocity)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 14]))
def test_patches_come_apart_and_together(channels: int, down: int, across: int, size: int) -> None:
    image = torch.arange(channels * down * across * size**2).float().reshape(channels, down * size, across * size)
    cut = patches(image, size)
    assert cut.shape == (down * across, size * size * channels)
    assert torch.equal(unpatched(cut, size, down, across), image)
    assert places(down, across, 9).tolist() == [9 * row + column for row in range(down) for column in range(across)]


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_scaled_images_fit(width: int, height: int) -> None:
    for limits in (sizes.Limits(512, 1024, 16), sizes.Limits(224, 980, 14)):
        made = sizes.scaled(width, height, limits)
        assert max(made) <= limits.most
        assert min(made) >= limits.multiple
        assert not any(side % limits.multiple for side in made)
