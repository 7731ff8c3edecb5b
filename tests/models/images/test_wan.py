"""Wan: the same videos as diffusers' pipelines, alone, in a batch, joined late; and what its parts refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of, quiet
from PIL import Image
from safetensors.torch import load_file, save_file

from segue.engines.diffusion.contract import Row
from segue.messages.errors import InvalidRequest
from segue.models.images.wan import tiny
from selection import daily


def make_image(seed: int, height: int, width: int) -> Image.Image:
    """Waves of colour: noise would not survive being resampled."""
    phases = np.random.default_rng(seed).uniform(0, 6, (3, 3))
    down, across = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    waves = [np.sin(6 * a * down + 5 * b * across + c) for a, b, c in phases]
    return Image.fromarray(((np.stack(waves, -1) + 1) * 127).astype(np.uint8))


FIRST, OTHER, LAST = make_image(0, 40, 50), make_image(1, 50, 40), make_image(2, 64, 64)
GUIDED = {
    "prompt": "a small boat left  the harbour &amp; the early morning",
    "negative_prompt": "grey, and without any colour",
    "guidance_scale": 3.0,
    "height": 32,
    "width": 64,
    "num_frames": 5,
    "num_inference_steps": 5,
    "seed": 3,
}
PLAIN = {**GUIDED, "prompt": "a red bicycle", "guidance_scale": 1.0, "num_inference_steps": 3, "seed": 4}
LONGER = {**GUIDED, "prompt": "a house", "num_frames": 9, "num_inference_steps": 4, "seed": 5}
SEVERAL = {**GUIDED, "prompt": "seven brothers", "num_inference_steps": 4, "num_videos_per_prompt": 2, "seed": 6}
CASES = [GUIDED, PLAIN, LONGER, SEVERAL]
BOTH = {"image": FIRST, "last_image": LAST}
KINDS: dict[str, list[dict[str, Any]]] = {
    "tiny": CASES,
    # the library's pipeline cannot make several videos of one image that CLIP sees
    "2.1-i2v": [{**case, "image": FIRST} for case in CASES[:3]],
    "2.1-flf2v": [{**case, **BOTH} for case in CASES[:3]],
    "2.2-t2v": [{**GUIDED, "guidance_scale_2": 2.0}, *CASES[1:]],
    "2.2-i2v": [{**GUIDED, "image": FIRST}, {**PLAIN, **BOTH}, {**LONGER, **BOTH}, {**SEVERAL, "image": OTHER}],
    "2.2-ti2v": [GUIDED, {**PLAIN, "image": FIRST}, {**LONGER, "image": OTHER}, {**SEVERAL, "image": FIRST}],
}
NAMES = daily(KINDS, KINDS.keys() - {"2.1-i2v"})


@dataclass
class Kind:
    """A checkpoint, loaded, and what the library's pipeline makes of its cases."""

    directory: Path
    chain: Chain
    cases: list[dict[str, Any]]
    theirs: list[list[torch.Tensor]]


Load = Callable[[str], Kind]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    made: dict[str, Kind] = {}

    def load(name: str) -> Kind:
        if name not in made:
            directory = tmp_path_factory.mktemp("wan") / name
            tiny.make(directory, name)
            # TI2V is named for one pipeline and serves both
            kinds = {kind: pipeline_of(directory, kind) for kind in {pipeline(case) for case in KINDS[name]}}
            theirs = [expected(kinds[pipeline(case)], case) for case in KINDS[name]]
            made[name] = Kind(directory, Chain(directory), KINDS[name], theirs)
        return made[name]

    return load


def pipeline(case: dict[str, Any]) -> str:
    return "WanImageToVideoPipeline" if "image" in case else "WanPipeline"


@pytest.mark.parametrize("name", NAMES)
def test_alone(load: Load, name: str) -> None:
    kind = load(name)
    for case, theirs in zip(kind.cases, kind.theirs, strict=True):
        [made] = kind.chain.run(case)
        assert apart(made, theirs) < WITHIN
        pieces = [1] + [4] * (case["num_frames"] // 4)
        fps = 24.0 if name == "2.2-ti2v" else 16.0
        for index, frames in enumerate(theirs):
            levels = abs(made.shown[index].astype(int) - (frames.numpy() * 255).round().astype(int))
            assert levels.max() <= 1, "frames that left one by one are those of the whole"
            assert [(count, rate) for place, count, rate in made.pieces if place == index] == [
                (count, fps) for count in pieces
            ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("late", [pytest.param({}, marks=pytest.mark.nightly), {1: 1, 2: 2, 3: 3}])
def test_in_a_batch_and_joined_late(load: Load, name: str, late: dict[int, int]) -> None:
    """Each is at another step with its own scheduler, some with another expert."""
    kind = load(name)
    made = kind.chain.run(*kind.cases, late={index: after for index, after in late.items() if index < len(kind.cases)})
    assert max(apart(one, theirs) for one, theirs in zip(made, kind.theirs, strict=True)) < WITHIN
    assert max(kind.chain.batches) > 2, "some share a call"


@pytest.mark.parametrize("name", NAMES)
def test_videos_show_what_was_asked_for(load: Load, name: str) -> None:
    for videos in load(name).theirs:
        assert all(0.1 < float(one.std()) < 0.45 for one in videos), "not grey"
        assert all(float((one[1:] - one[:-1]).abs().mean()) > 0.01 for one in videos), "and it moves"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *(("tiny", {key: value}) for key, value in (("prompt", "a small boot"), ("negative_prompt", "green"))),
        *(("tiny", {key: value}) for key, value in (("seed", 8), ("guidance_scale", 2.9))),
        ("2.2-t2v", {"guidance_scale_2": 2.1}),
        *((name, {"image": OTHER}) for name in ("2.1-i2v", "2.1-flf2v", "2.2-i2v")),
        ("2.1-flf2v", {"last_image": OTHER}),
        ("2.2-i2v", {"last_image": OTHER}),
    ],
)
def test_parity_fails_when_the_request_is_another(load: Load, name: str, changed: dict[str, Any]) -> None:
    kind = load(name)
    [made] = kind.chain.run({**kind.cases[0], **changed})
    assert apart(made, kind.theirs[0]) > 5 * WITHIN


@pytest.mark.parametrize(
    ("name", "part", "tensor"),
    [
        ("tiny", "text_encoder", "encoder.block.0.layer.1.DenseReluDense.wo.weight"),
        *(("tiny", "transformer", f"blocks.{block}.attn1.to_v.weight") for block in range(3)),
        ("tiny", "vae", "decoder.mid_block.resnets.0.conv1.weight"),
        ("2.2-t2v", "transformer", "blocks.1.attn2.to_v.weight"),
        ("2.2-t2v", "transformer_2", "blocks.1.attn2.to_v.weight"),
        ("2.1-flf2v", "image_encoder", "encoder.layers.0.mlp.fc2.weight"),
        ("2.1-flf2v", "vae", "encoder.mid_block.resnets.0.conv1.weight"),
    ],
)
def test_parity_fails_when_one_weight_is_another(load: Load, tmp_path: Path, name: str, part: str, tensor: str) -> None:
    kind = load(name)
    copy = Path(shutil.copytree(kind.directory, tmp_path / "copy"))
    [path] = (copy / part).glob("*.safetensors")
    tensors = load_file(path)
    [found] = [stored for stored in tensors if stored.endswith(tensor)]
    tensors[found][0, 0] += 1.0
    save_file(tensors, path, {"format": "pt"})
    [made] = Chain(copy).run(kind.cases[0])
    assert apart(made, kind.theirs[0]) > WITHIN


@pytest.mark.parametrize("name", NAMES)
def test_made_up_samples_are_like_real_ones(load: Load, name: str) -> None:
    """What the engine measures calls with."""
    denoiser = load(name).chain.adapters["denoiser"]
    smallest, *_ = trials = list(denoiser.trials())
    assert [sample.tokens for sample in trials] == sorted({sample.tokens for sample in trials})
    with torch.inference_mode():
        [prediction] = denoiser.predict([Row(smallest, 0)])
    assert prediction.shape == smallest.latents.shape


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # the library and NumPy 2
@pytest.mark.parametrize(
    "name",
    [pytest.param("FlowMatchEulerDiscreteScheduler", marks=pytest.mark.nightly), "DPMSolverMultistepScheduler"],
)
def test_other_schedulers(load: Load, tmp_path: Path, name: str) -> None:
    """The checkpoint's own may be another; and a request may name one that can step along a flow."""
    kind = load("tiny")
    directory = tmp_path / "other"
    shutil.copytree(kind.directory, directory)
    if name == "FlowMatchEulerDiscreteScheduler":
        index = json.loads((directory / "model_index.json").read_text())
        index["scheduler"] = ["diffusers", name]
        (directory / "model_index.json").write_text(json.dumps(index))
        shutil.rmtree(directory / "scheduler")
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(directory / "scheduler")
        chain, asked = Chain(directory), {}
    else:
        chain, asked = kind.chain, {"scheduler": name}
    pipeline = pipeline_of(directory, "WanPipeline")
    with quiet():
        pipeline.scheduler = getattr(diffusers, name).from_config(pipeline.scheduler.config)
    cases = [GUIDED, LONGER, SEVERAL]
    theirs = [expected(pipeline, case) for case in cases]
    made = chain.run(*({**case, **asked} for case in cases), late={1: 1, 2: 2})
    assert max(apart(one, other) for one, other in zip(made, theirs, strict=True)) < WITHIN
    assert apart(made[0], kind.theirs[0]) > WITHIN, "it is not UniPC's"


def test_images_are_encoded_once(load: Load) -> None:
    kind = load("2.1-i2v")
    encoders = [kind.chain.adapters[name] for name in ("vae_encoder", "image_encoder")]
    kind.chain.run(kind.cases[0])
    before = [encoder.cache.hits for encoder in encoders]
    [made] = kind.chain.run(kind.cases[0])
    assert [encoder.cache.hits for encoder in encoders] == [hits + 1 for hits in before]
    assert apart(made, kind.theirs[0]) < WITHIN


def test_random_weights_of_the_same_shape(load: Load) -> None:
    kind = load("2.2-i2v")
    [made] = Chain(kind.directory, load_format="dummy").run(kind.cases[0])
    assert made.pixels[0].shape == kind.theirs[0][0].shape
    assert made.pixels[0].isfinite().all()


def test_a_frame_rate_of_the_request_previews_and_tiles(load: Load) -> None:
    kind = load("tiny")
    decoder = kind.chain.adapters["decoder"]
    [made] = kind.chain.run({**LONGER, "fps": 12.5, "partial_images": 2})
    assert {fps for _, _, fps in made.pieces} == {12.5}
    assert {place: shown.shape for place, shown in made.previews.items()} == {
        (0, 0): (16, 32, 3),
        (0, 1): (16, 32, 3),
    }
    before, decoder._tile_pixels = decoder._tile_pixels, 100
    try:
        [tiled] = kind.chain.run(LONGER)
    finally:
        decoder._tile_pixels = before
    assert [count for _, count, _ in tiled.pieces] == [9], "blended over all frames, so it leaves whole"


@pytest.mark.parametrize(
    ("name", "wrong", "field", "says"),
    [
        ("tiny", {"num_frames": 8}, "num_frames", "5 or 9"),
        ("tiny", {"num_frames": 261}, "num_frames", "at most 257"),
        ("tiny", {"height": 100}, "height", "96 or 112"),
        ("2.2-ti2v", {"width": 48}, "width", "32 or 64"),
        ("tiny", {"image": FIRST}, "image", "takes text"),
        ("tiny", {"guidance_scale_2": 2.0}, "guidance_scale_2", "takes no guidance_scale_2"),
        ("tiny", {"true_cfg_scale": 2.0}, "true_cfg_scale", "takes no true_cfg_scale"),
        ("tiny", {"max_sequence_length": 513}, "max_sequence_length", "at most 512"),
        ("tiny", {"scheduler": "DDIMScheduler"}, "scheduler", "UniPCMultistepScheduler"),
        ("tiny", {"num_videos_per_prompt": 2, "num_images_per_prompt": 3}, "num_videos_per_prompt", "the same"),
        ("2.1-i2v", {}, "image", "needs 1"),
        ("2.1-i2v", BOTH, "last_image", "no last_image"),
        ("2.1-i2v", {"image": [FIRST, OTHER]}, "image", "at most 1"),
        ("2.1-i2v", {"image": FIRST, "max_sequence_length": 100}, "max_sequence_length", "512 tokens"),
        ("2.1-flf2v", {"image": FIRST}, "image", "needs 2"),
        ("2.1-flf2v", {"image": [FIRST, LAST]}, "image", "as last_image"),
        ("2.2-i2v", {"last_image": LAST}, "last_image", "one as image"),
        ("2.2-i2v", {**BOTH, "num_frames": 1}, "num_frames", "at least 5"),
        ("2.2-i2v", {"image": FIRST, "mask_image": FIRST}, "mask_image", "no mask_image"),
        ("2.2-ti2v", {"image": b"no image"}, "image", "picture|image"),
    ],
)
def test_refused(load: Load, name: str, wrong: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        load(name).chain.run({**PLAIN, **wrong})
    assert field in str(caught.value.field)


def test_the_same_seed_makes_the_same_files(load: Load, tmp_path: Path) -> None:
    for name in ("2.1-flf2v", "2.2-ti2v"):
        directory = load(name).directory
        tiny.make(tmp_path / name, name)
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                assert path.read_bytes() == (tmp_path / name / path.relative_to(directory)).read_bytes(), path
