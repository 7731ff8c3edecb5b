"""Checkpoints of pipelines with a part that is missing, or is not what it must be: said in one error that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusion_chain import Chain
from safetensors.torch import load_file, save_file

from segue.messages.errors import ConfigError
from segue.models.images.flux import tiny

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("flux")
    tiny.make(directory)
    return directory


def without(part: str) -> Callable[[Path], None]:
    return lambda directory: shutil.rmtree(directory / part)


def of_class(kind: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        index = directory / "model_index.json"
        index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": kind}))

    return change


def as_integers(part: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        weights = load_file(directory / part / WEIGHTS)
        save_file({name: weight.to(torch.int8) for name, weight in weights.items()}, directory / part / WEIGHTS)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("vae"), "vae/config.json: not there"),
        (without("tokenizer"), "the part 'tokenizer' of the pipeline is missing"),
        (without("transformer"), "the part 'transformer' of the pipeline is missing"),
        (as_integers("transformer"), "is stored as I8; it must be floating-point"),
        (as_integers("vae"), "is stored as I8; it must be floating-point"),
        (of_class(None), r"architectures \(of a pipeline: _class_name\) is \[None\]"),
        (of_class(3), r"is \[3\]; it must be the name of a class"),
        (of_class(["FluxPipeline"]), "it must be the name of a class"),
    ],
)
def test_what_is_wrong_is_named(whole: Path, tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
    directory = tmp_path / "broken"
    shutil.copytree(whole, directory)
    change(directory)
    with pytest.raises(ConfigError, match=says) as refused:
        Chain(directory)
    assert str(directory) in str(refused.value)


def test_the_whole_one_is_loaded(whole: Path) -> None:
    assert Chain(whole).adapters
