"""The networks in the published shape, without weights: every published tensor has its place, and no other is asked
for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.omni.bagel.config import LATENT_POSITIONS, WEIGHTS, Config, read_config
from segue.models.omni.bagel.decoder import language_model
from segue.models.omni.bagel.drawing.latents import LatentSpace
from segue.models.omni.bagel.loading import autoencoder, language_name, latent_name, vae_name, vision_name
from segue.models.omni.bagel.tiny.presets import make
from segue.models.omni.bagel.vision import VisionEncoder
from segue.models.shared.checkpoint.checkpoint import Checkpoint

PUBLISHED = Path(__file__).parents[2] / "published" / "BAGEL-7B-MoT"
EMA_BYTES = 29_214_685_368
"""Size of `ema.safetensors`, header included."""
AE_BYTES = 335_278_732
"""Size of the tensors of `ae.safetensors`."""

Shapes = dict[str, tuple[int, ...]]


def each(name: str) -> Iterator[str]:
    """The names that one with ranges ({0-27}) stands for."""
    if (found := re.search(r"\{(\d+)-(\d+)\}", name)) is None:
        yield name
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        yield from each(name[: found.start()] + str(number) + name[found.end() :])


def published(file: str) -> Shapes:
    shapes: dict[str, list[int]] = json.loads((PUBLISHED / "tensors.json").read_text())[file]
    return {one: tuple(shape) for name, shape in shapes.items() for one in each(name)}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("llm_config.json", "vit_config.json"):
        (tmp_path / name).write_bytes((PUBLISHED / name).read_bytes())
    (tmp_path / "config.json").write_text('{"name": ["BAGEL-7B-MoT"]}')
    return read_config(tmp_path)


def shapes_of(network: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def test_the_networks_have_exactly_the_published_tensors(config: Config) -> None:
    with torch.device("meta"):
        parts = ((language_model(config.llm), language_name), (VisionEncoder(config), vision_name))
        latents, vae = LatentSpace(config), autoencoder(config.vae)
    ours = {name_of(name): shape for part, name_of in parts for name, shape in shapes_of(part).items()}
    ours |= {latent_name(name): shape for name, shape in shapes_of(latents).items()}
    assert ours == published("ema.safetensors")
    stored = {
        name: (*shape, 1, 1) if ".attn_1." in name and len(shape) == 2 else shape
        for name, shape in ((vae_name(name, config.vae), shape) for name, shape in shapes_of(vae).items())
    }
    assert stored == published("ae.safetensors")


def test_the_published_shapes_make_files_of_the_known_sizes() -> None:
    """To the byte: a safetensors file is its header, which spells every name, shape and place, and its tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in sorted(published("ema.safetensors").items()):
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    spelled = len(json.dumps(header, separators=(",", ":")))
    assert 8 + spelled + -spelled % 8 + at == EMA_BYTES
    assert sum(4 * math.prod(shape) for shape in published("ae.safetensors").values()) == AE_BYTES


def test_a_wrong_config_is_named(config: Config, tmp_path: Path) -> None:
    values = json.loads((tmp_path / "llm_config.json").read_text())
    (tmp_path / "llm_config.json").write_text(json.dumps({**values, "hidden_size": "wide"}))
    with pytest.raises(ConfigError, match=r"llm_config\.json: .*hidden_size"):
        read_config(tmp_path)
    (tmp_path / "vit_config.json").unlink()
    (tmp_path / "llm_config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"vit_config\.json"):
        read_config(tmp_path)


def test_the_tiny_checkpoint_has_the_published_layout(tiny_dir: Path, tmp_path: Path) -> None:
    tiny = read_config(tiny_dir)
    assert tiny.latent_side**2 == Checkpoint(tiny_dir, WEIGHTS).shapes()[LATENT_POSITIONS].shape[0]
    for file in ("ema.safetensors", "ae.safetensors"):
        ours, theirs = Checkpoint(tiny_dir, file).names, published(file)
        assert {re.sub(r"\d+", "N", name) for name in ours} == {re.sub(r"\d+", "N", name) for name in theirs}
    own = json.loads((tiny_dir / "vit_config.json").read_text())["num_hidden_layers"]
    assert f"vit_model.vision_model.encoder.layers.{own - 1}.mlp.fc1.bias" not in Checkpoint(tiny_dir, WEIGHTS)
    with pytest.raises(InvalidRequest, match="no size 'huge'"):
        make(tmp_path, "huge")


@pytest.mark.nightly
def test_equal_seeds_make_equal_files(tiny_dir: Path, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        make(tmp_path, seed=seed)
        for name in ("ema.safetensors", "ae.safetensors"):
            assert ((tmp_path / name).read_bytes() == (tiny_dir / name).read_bytes()) is same
