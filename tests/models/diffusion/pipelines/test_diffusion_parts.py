"""Parts of a pipeline: found, loaded, refused; schedulers; prompts encoded once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from segue.engines.diffusion.contract import DenoiserContext
from segue.engines.module.contract import Work
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed
from segue.models.registry import PIPELINE, family_of, read_config
from segue.models.shared.diffusion.denoiser.schedulers import Schedulers
from segue.models.shared.diffusion.loading import load_component, load_tokenizer
from segue.models.shared.diffusion.sizes import fitting_size
from segue.models.shared.diffusion.text_encoder import TextEncoder
from segue.models.shared.diffusion.vae import levels


@pytest.fixture
def copy(qwen_image_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(qwen_image_dir, tmp_path / "copy"))


def context(directory: Path, **more: Any) -> DenoiserContext:
    return DenoiserContext(directory, "denoiser", torch.device("cpu"), torch.float32, **more)


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_pipeline_is_found_by_its_class(qwen_image_dir: Path) -> None:
    config = read_config(qwen_image_dir)
    assert config["architectures"] == ["QwenImagePipeline"]
    assert family_of(config, qwen_image_dir).name == "qwen_image"


@pytest.mark.parametrize(("part", "name"), [("transformer", "diffusion_pytorch_model"), ("text_encoder", "model")])
def test_weights_whose_files_are_marked(copy: Path, part: str, name: str) -> None:
    """As they are published in half precision: `diffusion_pytorch_model.fp16.safetensors`. Others go first."""
    plain = load_component(context(copy), part).state_dict()
    marked = copy / part / f"{name}.fp16.safetensors"
    save_file({key: tensor.half() for key, tensor in load_file(copy / part / f"{name}.safetensors").items()}, marked)
    both = load_component(context(copy), part).state_dict()
    (copy / part / f"{name}.safetensors").unlink()
    alone = load_component(context(copy), part).state_dict()
    for key, tensor in plain.items():
        assert torch.equal(both[key], tensor)
        assert torch.equal(alone[key], tensor.half().float())


def test_parts_that_cannot_be_loaded_are_named(copy: Path) -> None:
    with pytest.raises(ConfigError, match="load_format"):
        load_component(context(copy, load_format="dumy"), "transformer")
    with pytest.raises(ConfigError, match="no part 'unet'"):
        load_component(context(copy), "unet")
    edit(copy / PIPELINE, vae=["diffusers", "AutoencoderOfNobody"], transformer=["their_code", "Transformer"])
    for part in ("vae", "transformer"):
        with pytest.raises(ConfigError, match="do not have"):
            load_component(context(copy), part)
    shutil.rmtree(copy / "tokenizer")
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(copy)


def test_a_tensor_that_is_missing_is_named(copy: Path) -> None:
    [path] = (copy / "transformer").glob("*.safetensors")
    tensors = load_file(path)
    del tensors["proj_out.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"proj_out\.weight"):
        load_component(context(copy), "transformer")
    path.unlink()
    with pytest.raises(ConfigError, match="weights"):
        load_component(context(copy), "transformer")


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_file_that_is_cut_off_is_named(copy: Path, part: str) -> None:
    path = sorted((copy / part).glob("*.safetensors"))[-1]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=rf"{part}/{path.name}"):
        load_component(context(copy), part)


def test_schedulers_are_those_that_diffusers_lists(copy: Path) -> None:
    diffusers.EulerDiscreteScheduler(beta_start=0.001).save_pretrained(copy / "scheduler")
    edit(copy / PIPELINE, scheduler=["diffusers", "EulerDiscreteScheduler"])
    schedulers = Schedulers(copy)
    assert {"EulerDiscreteScheduler", "DDIMScheduler", "UniPCMultistepScheduler"} <= set(schedulers.known)
    first, second = schedulers.make("DDIMScheduler"), schedulers.make("DDIMScheduler")
    assert type(first) is diffusers.DDIMScheduler
    assert first is not second
    assert first.config.beta_start == 0.001, "with the checkpoint's settings"
    assert type(schedulers.make()) is diffusers.EulerDiscreteScheduler
    for name in ("FlowMatchEulerDiscreteScheduler", "DDIMSchedular", "QwenImagePipeline"):
        with pytest.raises(InvalidRequest, match=name) as caught:
            schedulers.make(name)
        assert caught.value.field == "scheduler"


class Lengths(TextEncoder):
    """A text becomes its length and the sum of its bytes."""

    names = ("embeds", "pooled")

    def __init__(self, ctx: DenoiserContext) -> None:
        super().__init__(ctx)
        self.calls: list[list[Any]] = []

    def encode(self, items: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        self.calls.append(list(items))
        return [
            {"embeds": torch.tensor([len(item["text"])]), "pooled": torch.tensor(sum(item["text"].encode()))}
            for item in items
        ]


def works(*texts: Sequence[str]) -> list[Work]:
    encoder_input = [[{"text": text, "tensor": torch.ones(2)} for text in one] for one in texts]
    return [Work(str(place), items, last=True) for place, items in enumerate(encoder_input)]


def test_equal_prompts_of_many_requests_are_encoded_once(qwen_image_dir: Path) -> None:
    encoder = Lengths(context(qwen_image_dir))
    results = encoder.run(works(["red", ""], ["blue", ""], ["red"]))
    assert [[item["text"] for item in call] for call in encoder.calls] == [["red", "", "blue"]]
    made = [[int(text["embeds"]) for text in (result.payload or {})["texts"]] for result in results]
    assert made == [[3, 0], [4, 0], [3]]
    again = encoder.run(works(["blue", "green"]))
    assert [item["text"] for item in encoder.calls[1]] == ["green"]
    assert [int(text["pooled"]) for text in (again[0].payload or {})["texts"]] == [
        sum(b"blue"),
        sum(b"green"),
    ]
    none = Lengths(context(qwen_image_dir, options={"cache_bytes": 0}))
    none.run(works(["red"]))
    none.run(works(["red"]))
    assert len(none.calls) == 2


@given(height=st.integers(1, 2**32), width=st.integers(1, 2**32), multiple=st.sampled_from([8, 16, 32]))
def test_a_size_that_is_offered_instead_would_be_taken(height: int, width: int, multiple: int) -> None:
    pixels = 4_194_304
    offered = fitting_size(height, width, pixels, multiple)
    assert offered[0] * offered[1] <= pixels
    assert all(side >= multiple and side % multiple == 0 for side in offered)
    assert (offered[0] >= offered[1]) == (height >= width) or offered[0] == offered[1]


def test_an_image_of_no_numbers_is_an_error() -> None:
    """It would be black."""
    assert levels(torch.tensor([0.0, 0.5, 1.0]), 0).tolist() == [0, 128, 255]
    with pytest.raises(StageFailed, match="output 3 contains NaN"):
        levels(torch.tensor([0.0, torch.nan]), 3)
