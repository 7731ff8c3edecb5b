"""Folded blocks of Qwen-Image against the library's: one row and several, masks, and each weight that they read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from segue.engines.diffusion.contract import DenoiserContext
from segue.kernels.prepare import Plan, prepare
from segue.models.images.qwen_image import tiny
from segue.models.images.qwen_image.folded import FoldedBlock, fold, foldable
from segue.models.shared.diffusion.denoiser.block_cache import BlockCache
from segue.models.shared.diffusion.denoiser.tuning import PACKED_ROWS, gelus
from segue.models.shared.diffusion.library import QwenImageTransformerBlock
from segue.parallel.ways import Shape, Ways

CLOSE = 1e-4
"""Of the largest value."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen-image")
    tiny.make(directory)
    return directory


def network(checkpoint: Path) -> Any:
    kind = tiny.LIBRARIES["diffusers"].QwenImageTransformer2DModel
    return kind.from_pretrained(checkpoint / "transformer", local_files_only=True).eval().requires_grad_(False)


def given(rows: int, *, masked: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    mask = torch.ones(rows, 7, dtype=torch.bool)
    mask[0, 4:] = False
    return {
        "hidden_states": torch.randn(rows, 36, 64, generator=generator),
        "encoder_hidden_states": torch.randn(rows, 7, 64, generator=generator),
        "encoder_hidden_states_mask": mask if masked else None,
        "timestep": torch.linspace(0.2, 0.9, rows),
        "img_shapes": [[(1, 6, 6)]] * rows,
        "return_dict": False,
    }


@torch.inference_mode()
def difference(one: Any, other: Any, **asked: Any) -> float:
    """Of two networks' answers, as a share of the largest value."""
    [mine], [theirs] = one(**given(**asked)), other(**given(**asked))
    return float((mine - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("packed", [False, True])
def test_the_same_answers_in_every_kind_of_call(checkpoint: Path, packed: bool) -> None:
    plain, folded = network(checkpoint), network(checkpoint)
    assert fold(folded, keep_modulations=True) == len(plain.transformer_blocks)
    if packed:
        plan = Plan(first_call=True, rows=PACKED_ROWS, gelus=gelus(folded))
        prepare(folded, torch.device("cpu"), plan)
    for asked in ({"rows": 1}, {"rows": 3}, {"rows": 1}, {"rows": 2, "masked": True}, {"rows": 3}):
        assert difference(folded, plain, **asked) < CLOSE
    assert difference(folded, lambda **named: plain(**{**named, "timestep": named["timestep"] + 0.01}), rows=2) > CLOSE


def test_text_that_a_block_behind_reads_is_made(checkpoint: Path) -> None:
    """The last block here is somebody's own, and stays as it is."""
    plain, folded = network(checkpoint), network(checkpoint)
    folded.transformer_blocks[-1].register_forward_hook(lambda module, given, made: None)
    assert fold(folded, keep_modulations=True) == len(plain.transformer_blocks) - 1
    assert difference(folded, plain, rows=2) < CLOSE


DIVIDED = Ways(Shape(tokens=2), None, None, None, None, None)


def test_what_a_stage_says_decides() -> None:
    ctx = DenoiserContext(Path(), "denoiser", torch.device("cpu"), torch.float32)
    assert foldable(ctx)
    for other in ({"fused": False}, {"compile": True}, {"dtype": torch.bfloat16}, {"ways": DIVIDED}):
        assert not foldable(replace(ctx, **other))


def test_every_weight_is_in_the_answer(checkpoint: Path) -> None:
    plain, folded = network(checkpoint), network(checkpoint)
    fold(folded, keep_modulations=False)
    names = [name for name, _ in plain.named_parameters() if name.startswith("transformer_blocks.0.")]
    assert [name for name, _ in folded.named_parameters() if name.startswith("transformer_blocks.0.")] == names
    assert len(names) > 30
    for name in names:
        for one in (plain, folded):
            weight = one.get_parameter(name)
            weight.copy_(
                weight.flip(0) * torch.linspace(0.5, 2.0, len(weight)).view(-1, *[1] * (weight.ndim - 1)) + 0.1
            )
        assert difference(folded, plain, rows=2, masked=True) < CLOSE, name
    assert difference(folded, network(checkpoint), rows=2, masked=True) > 0.1


def test_what_a_block_is_given_stays(checkpoint: Path) -> None:
    """Step caches compare what a block is given with what it makes."""
    folded = network(checkpoint)
    fold(folded, keep_modulations=False)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
        seen.extend((named[name], named[name].clone()) for name in ("hidden_states", "encoder_hidden_states"))

    for block in folded.transformer_blocks:
        block.register_forward_pre_hook(note, with_kwargs=True)
    with torch.inference_mode():
        folded(**given(2))
    assert len(seen) == 2 * len(folded.transformer_blocks)
    assert all(torch.equal(now, before) for now, before in seen)


def test_blocks_that_someone_looks_at_stay_the_librarys(checkpoint: Path) -> None:
    hooked = network(checkpoint)
    BlockCache([hooked])
    assert fold(hooked, keep_modulations=True) == 0
    assert {type(block) for block in hooked.transformer_blocks} == {QwenImageTransformerBlock}
    folded = network(checkpoint)
    fold(folded, keep_modulations=True)
    BlockCache([folded])
    assert {type(block) for block in folded.transformer_blocks} == {FoldedBlock}
