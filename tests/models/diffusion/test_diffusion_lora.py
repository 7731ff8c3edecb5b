"""LoRA adapters of denoisers: a request's image is that of the library's pipeline with the adapter in its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LCMScheduler
from diffusion_adapters import Weights, drawn, write
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of
from safetensors.torch import save_file
from torch import nn

from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import ConfigError, NotFound
from segue.models.images.flux import tiny as flux
from segue.models.images.flux2 import tiny as flux2
from segue.models.images.qwen_image import tiny as qwen_image
from segue.models.images.sdxl import tiny as sdxl
from segue.models.images.stable_diffusion_3 import tiny as stable_diffusion_3
from segue.models.images.wan import tiny as wan
from segue.models.images.z_image import tiny as z_image

FAMILIES = {
    "flux": (flux.make, "FluxPipeline", {"max_sequence_length": 32}),
    "flux2": (flux2.make, "Flux2Pipeline", {"max_sequence_length": 96}),
    "sd3": (stable_diffusion_3.make, "StableDiffusion3Pipeline", {"max_sequence_length": 32, "guidance_scale": 1.0}),
    "z-image": (z_image.make, "ZImagePipeline", {"guidance_scale": 0.0}),
    "sdxl": (sdxl.make, "StableDiffusionXLPipeline", {"guidance_scale": 1.0}),
    "wan": (wan.make, "WanPipeline", {"guidance_scale": 1.0, "num_frames": 5}),
    "qwen-image": (qwen_image.make, "QwenImagePipeline", {"true_cfg_scale": 1.0}),
}
ASKED = {"prompt": "a small boat left the harbour", "height": 64, "width": 64, "num_inference_steps": 3, "seed": 3}


@contextmanager
def merged(network: nn.Module, weights: Weights, scale: float) -> Iterator[None]:
    kept = {name: network.get_submodule(name).weight.detach().clone() for name in weights}
    with torch.no_grad():
        for name, (down, up) in weights.items():
            network.get_submodule(name).weight += scale * up @ down
        yield
        for name, weight in kept.items():
            network.get_submodule(name).weight.copy_(weight)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' schedulers and numpy 2
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_request_with_its_own(family: str, tmp_path: Path) -> None:
    """Two adapters and none, in one engine, one joining late; of two files' layouts."""
    make, kind, more = FAMILIES[family]
    make(tmp_path / "model")
    pipeline = pipeline_of(tmp_path / "model", kind)
    part = "unet" if family == "sdxl" else "transformer"
    network = pipeline.components[part]
    ink, oil = drawn(network, 4, 1), drawn(network, 2, 2)
    plan = LoraPlan(
        {
            "ink": str(write(tmp_path / "ink", ink, f"{part}.", {f"{part}.r": 4, f"{part}.lora_alpha": 2})),
            "oil": str(write(tmp_path / "oil", oil, f"{part}.")),
        },
        max_rank=4,
    )
    chain = Chain(tmp_path / "model", lora=plan)
    plain = {**ASKED, **more}
    made = chain.run(plain, {**plain, "adapter": "ink"}, {**plain, "adapter": "oil"}, plain, late={2: 1})
    bare = expected(pipeline, plain)
    with merged(network, ink, 0.5):
        inked = expected(pipeline, plain)
    with merged(network, oil, 1.0):
        oiled = expected(pipeline, plain)
    for one, images in zip(made, (bare, inked, oiled, bare), strict=True):
        assert apart(one, images) < WITHIN
    assert max(chain.batches) == 2, "those without one share their calls"
    for one, other in ((bare, inked), (bare, oiled), (inked, oiled)):
        assert float((one[0] - other[0]).abs().mean()) > 0.01, "adapters show"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("flux")
    flux.make(made)
    return made


def test_as_peft_writes_it_and_while_it_runs(model: Path, tmp_path: Path) -> None:
    pipeline = pipeline_of(model, "FluxPipeline")
    ink = drawn(pipeline.transformer, 4, 1)
    saved = write(tmp_path / "ink", ink, part="base_model.model.")
    (saved / "pytorch_lora_weights.safetensors").rename(saved / "adapter_model.safetensors")
    (saved / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    chain = Chain(model, lora=LoraPlan())
    asked = {**ASKED, "max_sequence_length": 32, "adapter": "ink"}
    with pytest.raises(NotFound, match="no LoRA adapter 'ink'"):
        chain.run(asked)
    adapters = chain.adapters["denoiser"].lora
    adapters.load("ink", str(saved))
    with merged(pipeline.transformer, ink, 2.0):
        assert apart(chain.run(asked)[0], expected(pipeline, asked)) < WITHIN
    adapters.unload("ink")
    with pytest.raises(NotFound):
        chain.run(asked)


def few_steps(made: Weights, name: Callable[[str], str], alpha: float) -> dict[str, torch.Tensor]:
    """The tensors of a file as trainers of adapters for few steps write it; `name`: what they call a layer."""
    tensors = {}
    for layer, (down, up) in made.items():
        tensors[f"{name(layer)}.lora_down.weight"] = down
        tensors[f"{name(layer)}.lora_up.weight"] = up
        tensors[f"{name(layer)}.alpha"] = torch.tensor(alpha)
    return tensors


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' schedulers and numpy 2
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
@pytest.mark.parametrize("family", ["qwen-image", "sdxl"])
def test_fewer_steps(family: str, tmp_path: Path) -> None:
    """Qwen-Image with a file in the layout of Lightning and noise levels of its own; SDXL with one in that of LCM-LoRA
    and another scheduler: in four steps without guidance, what the pipeline makes with the adapter in its weights."""
    make, kind, _ = FAMILIES[family]
    make(tmp_path / "model")
    pipeline = pipeline_of(tmp_path / "model", kind)
    network = pipeline.unet if family == "sdxl" else pipeline.transformer
    ink = drawn(network, 4, 1)
    asked: dict[str, Any] = {**ASKED, "num_inference_steps": 4}
    if family == "sdxl":
        ink = {layer: pair for layer, pair in ink.items() if ".attn" in layer}
        tensors = few_steps(ink, lambda layer: "lora_unet_" + layer.replace(".", "_"), 2.0)
        asked |= {"guidance_scale": 1.0, "scheduler": "LCMScheduler"}
        pipeline.scheduler = LCMScheduler.from_config(pipeline.scheduler.config)
    else:
        ink = {layer: pair for layer, pair in ink.items() if layer.startswith("transformer_blocks")}
        tensors = few_steps(ink, lambda layer: layer, 2.0)
        asked |= {"true_cfg_scale": 1.0, "sigmas": [1.0, 0.9, 0.7, 0.4]}
    save_file(tensors, tmp_path / "four_steps.safetensors")
    plan = LoraPlan({"four": str(tmp_path / "four_steps.safetensors")}, max_rank=4)
    [made] = Chain(tmp_path / "model", lora=plan).run({**asked, "adapter": "four"})
    wanted = {key: value for key, value in asked.items() if key != "scheduler"}
    assert len(made.progress) == 4
    with merged(network, ink, 0.5):
        assert apart(made, expected(pipeline, wanted)) < WITHIN
    assert apart(made, expected(pipeline, wanted)) > 10 * WITHIN, "the adapter shows"


def test_a_stage_that_takes_none(model: Path) -> None:
    with pytest.raises(NotFound, match="this stage has none"):
        Chain(model).run({**ASKED, "adapter": "ink"})


@pytest.mark.parametrize(
    ("name", "shape", "header", "says"),
    [
        ("text_encoder.layers.0.mlp.fc1.lora_A.weight", (4, 32), None, "text encoders"),
        ("lora_unet_double_blocks_0.lora_down.weight", (4, 32), None, "other programs' names"),
        ("transformer.transformer_blocks.7.attn.to_q.lora_A.weight", (4, 32), None, "not a linear layer"),
        ("transformer.x_embedder.lora_A.weight", (4, 64), None, "has lora_A but not its counterpart"),
        (
            "transformer.x_embedder.lora_A.weight",
            (4, 64),
            {"transformer.r": 4, "transformer.use_dora": True},
            "use_dora",
        ),
        ("transformer.x_embedder.lora_A.weight", (4, 64), {"transformer.r": 0}, "r is 0"),
    ],
)
def test_refused(
    model: Path, tmp_path: Path, name: str, shape: tuple[int, ...], header: dict[str, Any] | None, says: str
) -> None:
    written = None if header is None else {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 1, **header})}
    save_file({name: torch.zeros(shape)}, tmp_path / "bad.safetensors", metadata=written)
    with pytest.raises(ConfigError, match=says):
        Chain(model, lora=LoraPlan({"bad": str(tmp_path / "bad.safetensors")}))


def test_refused_for_its_rank_and_where_there_is_none(model: Path, tmp_path: Path) -> None:
    adapter = {"transformer.x_embedder.lora_A.weight": torch.zeros(4, 64)}
    adapter["transformer.x_embedder.lora_B.weight"] = torch.zeros(32, 4)
    save_file(adapter, tmp_path / "any.safetensors")
    with pytest.raises(ConfigError, match="rank 4, more than"):
        Chain(model, lora=LoraPlan({"any": str(tmp_path)}, max_rank=3))
    with pytest.raises(ConfigError, match="it is not a LoRA adapter"):
        Chain(model, lora=LoraPlan({"none": str(tmp_path / "none")}))
