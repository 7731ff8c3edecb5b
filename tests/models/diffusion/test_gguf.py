"""Denoisers with weights from a GGUF file: what diffusers' pipeline makes with the same file; bad files are named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_chain import WITHIN, Chain, apart, expected, pipeline_of, quiet
from safetensors.torch import save_file

pytest.importorskip("gguf", reason="of the dev extra")

import diffusers
import gguf
from gguf import GGMLQuantizationType as Type
from gguf_writing import published_wan, write_gguf

from segue.engines.diffusion.contract import DenoiserContext
from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import ConfigError
from segue.models.registry import tiny_preset
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.diffusion.denoiser.tuning import load_network, offload
from segue.models.shared.diffusion.loading import load_component
from segue.parallel.ways import Shape, Ways

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"prompt": "a small boat", "height": 64, "width": 64, "num_inference_steps": 3, "seed": 3}
VIDEO = {"num_frames": 5, "negative_prompt": "grey"}


def context(checkpoint: Path, file: Path | str, **keys: Any) -> DenoiserContext:
    return DenoiserContext(checkpoint, "denoiser", CPU, torch.float32, gguf={"transformer": str(file)}, **keys)


def library_transformer(kind: str, checkpoint: Path, file: Path) -> Any:
    with quiet():
        return getattr(diffusers, kind).from_single_file(
            str(file),
            config=str(checkpoint),
            subfolder="transformer",
            quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
            dtype=torch.float32,
        )


@pytest.mark.parametrize(
    ("family", "pipeline", "network", "kind", "rename", "more"),
    [
        ("flux", "FluxPipeline", "FluxTransformer2DModel", Type.Q8_0, str, {}),
        ("flux", "FluxPipeline", "FluxTransformer2DModel", Type.Q4_0, str, {}),
        ("wan", "WanPipeline", "WanTransformer3DModel", Type.Q8_0, published_wan, VIDEO),
    ],
)
def test_the_same_as_diffusers(
    family: str,
    pipeline: str,
    network: str,
    kind: Type,
    rename: Callable[[str], str],
    more: dict[str, Any],
    tmp_path: Path,
) -> None:
    checkpoint, file = tmp_path / "checkpoint", tmp_path / "model.gguf"
    tiny_preset(family).make(checkpoint, "tiny", 0)
    written = write_gguf(checkpoint, file, kind, rename=rename)
    assert list(written.values()).count(kind) > 3
    assert (Type.Q4_K in written.values()) == (family != "wan"), "of the time embedding, which has 256 inputs"
    asked = {**SMALL, **more}
    chain = Chain(checkpoint)
    exact = chain.run(asked)[0]
    transformer = library_transformer(network, checkpoint, file)
    theirs = expected(pipeline_of(checkpoint, pipeline, transformer=transformer), asked)
    quantised = chain.through(chain.stages.STAGE_MODELS["denoiser"](context(checkpoint, file)))
    assert apart(quantised.run(asked)[0], theirs) < WITHIN
    assert apart(exact, theirs) > WITHIN, "it is a loss"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and its transformer as Q8_0."""
    directory = tmp_path_factory.mktemp("flux-gguf")
    tiny_preset("flux").make(directory / "checkpoint", "tiny", 0)
    write_gguf(directory / "checkpoint", directory / "model.gguf", Type.Q8_0)
    return directory / "checkpoint", directory / "model.gguf"


def given() -> dict[str, Any]:
    """Of a call of the tiny FLUX."""
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(2, 16, 64, generator=generator),
        "encoder_hidden_states": torch.randn(2, 12, 64, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.tensor([0.3, 0.9]),
        "guidance": torch.tensor([3.5, 2.0]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(12, 3),
        "return_dict": False,
    }


def test_weights_take_less_and_can_wait_elsewhere(flux: tuple[Path, Path]) -> None:
    checkpoint, file = flux
    theirs = library_transformer("FluxTransformer2DModel", checkpoint, file)
    mine = load_network(context(checkpoint, file), "transformer")
    assert held_bytes(mine) < 0.5 * held_bytes(
        load_component(DenoiserContext(checkpoint, "", CPU, torch.float32), "transformer")
    )
    with torch.inference_mode():
        wanted = theirs(**given())[0]
        torch.testing.assert_close(mine(**given())[0], wanted, atol=1e-4, rtol=1e-4)
        offload(mine, CPU)
        torch.testing.assert_close(mine(**given())[0], wanted, atol=1e-4, rtol=1e-4)


def test_adapters_over_quantised_weights(flux: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, file = flux
    layer, generator = "transformer_blocks.0.attn.to_q", torch.Generator().manual_seed(1)
    down, up = (torch.randn(shape, generator=generator) for shape in ((4, 32), (32, 4)))
    tensors = {f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}
    save_file(tensors, tmp_path / "ink.safetensors")
    chain = Chain(checkpoint)
    keys: dict[str, Any] = {"lora": LoraPlan({"ink": str(tmp_path / "ink.safetensors")})}
    quantised = chain.through(chain.stages.STAGE_MODELS["denoiser"](context(checkpoint, file, **keys)))
    plain, inked = quantised.run(SMALL, {**SMALL, "adapter": "ink"})
    transformer = library_transformer("FluxTransformer2DModel", checkpoint, file)
    pipeline = pipeline_of(checkpoint, "FluxPipeline", transformer=transformer)
    assert apart(plain, expected(pipeline, SMALL)) < WITHIN

    def added(module: Any, given: tuple[torch.Tensor, ...], made: torch.Tensor) -> torch.Tensor:
        return made + given[0] @ down.T @ up.T

    transformer.get_submodule(layer).register_forward_hook(added)
    theirs = expected(pipeline, SMALL)
    assert apart(inked, theirs) < WITHIN
    assert apart(plain, theirs) > WITHIN


def test_without_the_package(flux: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"stages\.denoiser\.gguf is set, which needs the package gguf: pip install"):
        load_network(context(*flux), "transformer")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"quantization": "int8"}, "quantization does not go with gguf: its weights are quantised already"),
        (
            {"ways": Ways(Shape(weights=2), *[None] * 5)},
            "tensor_parallel does not go with gguf: its weights are packed",
        ),
        ({"load_format": "dummy"}, "load_format does not go with gguf"),
    ],
)
def test_what_does_not_go_with_it(flux: tuple[Path, Path], keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_network(context(*flux, **keys), "transformer")
    assert caught.value.field == f"stages.denoiser.{says.split()[0]}"


def test_bad_files(flux: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, _ = flux

    def refused(file: Path, says: str) -> None:
        with pytest.raises(ConfigError, match=says) as caught:
            load_network(context(checkpoint, file), "transformer")
        assert caught.value.field == "stages.denoiser.gguf"

    refused(tmp_path / "nowhere.gguf", "there is no file .*nowhere.gguf")
    (tmp_path / "text.gguf").write_text("no such thing, but longer than a header would be")
    refused(tmp_path / "text.gguf", "text.gguf: cannot be read as the weights of transformer")
    other = context(checkpoint, "x.gguf")
    other.gguf = {"transformer_3": "x.gguf"}
    with pytest.raises(ConfigError, match="has a file for 'transformer_3', which is not a network of this stage"):
        load_network(other, "transformer")
    writer = gguf.GGUFWriter(str(tmp_path / "some.gguf"), "test")
    writer.add_tensor("proj_out.bias", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "some.gguf", "some.gguf: ")
    write_gguf(checkpoint, tmp_path / "norms.gguf", Type.Q8_0, wide=Type.BF16)
    refused(tmp_path / "norms.gguf", "linear_1.bias' is of type BF16; except weights of linear layers")
