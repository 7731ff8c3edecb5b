"""Keys of a diffusion stage: what is lossless changes nothing, what is lossy a little, what cannot be is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_chain import WITHIN, Chain, Made, apart
from row_rank_process import compiled_eagerly

from segue.engines.diffusion.contract import DenoiserContext
from segue.graph.deployment.options import LoraPlan
from segue.kernels.cpu.native import libraries, library
from segue.kernels.cpu.network_recorder import CpuRecorder
from segue.kernels.graphs.replay import Call, NetworkGraphs, Recorded
from segue.kernels.linear.layers import QuantizedLinear
from segue.messages.errors import ConfigError
from segue.models.images.qwen_image.denoiser import QwenImageDenoiser
from segue.models.shared.diffusion.denoiser.tuning import load_network, offload
from segue.models.shared.diffusion.loading import load_component

ASKED = {
    "prompt": "a small boat",
    "negative_prompt": "grey, and without any colour",
    "true_cfg_scale": 3.0,
    "height": 64,
    "width": 96,
    "num_inference_steps": 4,
    "seed": 3,
}


@pytest.fixture(scope="module")
def chain(qwen_image_dir: Path) -> Chain:
    return Chain(qwen_image_dir)


@pytest.fixture(scope="module")
def exact(chain: Chain) -> Made:
    return chain.run(ASKED)[0]


def context(directory: Path, **keys: Any) -> DenoiserContext:
    return replace(DenoiserContext(directory, "denoiser", torch.device("cpu"), torch.float32), **keys)


def made_with(chain: Chain, directory: Path, **keys: Any) -> Made:
    return chain.through(QwenImageDenoiser(context(directory, **keys))).run(ASKED)[0]


def test_attention_by_name(chain: Chain, qwen_image_dir: Path, exact: Made) -> None:
    assert apart(made_with(chain, qwen_image_dir, attention="native"), exact.pixels) < WITHIN


@pytest.mark.skipif(library() is None, reason="the kernels were not compiled, or not for this CPU")
def test_a_cpu_has_an_attention_of_its_own_unless_another_is_named(qwen_image_dir: Path) -> None:
    given = {
        "hidden_states": torch.randn(2, 144, 64),
        "encoder_hidden_states": torch.randn(2, 12, 64),
        "timestep": torch.tensor([0.3, 0.9]),
        "img_shapes": [[(1, 12, 12)]] * 2,
    }
    names = ("auto", "native", "native")
    networks = [load_network(context(qwen_image_dir, attention=name), "transformer") for name in names]
    networks.append(load_component(context(qwen_image_dir), "transformer"))
    with torch.inference_mode():
        own, named, again, plain = (network(**given, return_dict=False)[0] for network in networks)
    assert torch.equal(named, again), "nothing but the attention is another"
    assert not torch.equal(own, named)
    torch.testing.assert_close(own, plain, rtol=0, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.25), ("fp8", 0.5)])
def test_quantised_weights(chain: Chain, qwen_image_dir: Path, exact: Made, kind: str, most: float) -> None:
    """The preset's sharp attention makes much of an error; other weights would be at 1.4."""
    network = load_network(context(qwen_image_dir, quantization=kind), "transformer")
    assert sum(isinstance(module, QuantizedLinear) for module in network.modules()) > 10
    plain = load_component(context(qwen_image_dir), "transformer")
    generator = torch.Generator().manual_seed(0)
    given = {
        "hidden_states": torch.randn(2, 16, 64, generator=generator),
        "encoder_hidden_states": torch.randn(2, 12, 64, generator=generator),
        "timestep": torch.tensor([0.3, 0.9]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }
    with torch.inference_mode():
        mine, theirs = (one(**given, return_dict=False)[0] for one in (network, plain))
    error = float((mine - theirs).norm() / theirs.norm())
    assert 1e-4 < error < most
    assert apart(made_with(chain, qwen_image_dir, quantization=kind), exact.pixels) > WITHIN, "it is a loss"


@pytest.mark.nightly
def test_compiled_blocks(chain: Chain, qwen_image_dir: Path, exact: Made) -> None:
    asked = {**ASKED, "step_cache": "first_block"}
    with compiled_eagerly() as graphs:
        assert apart(made_with(chain, qwen_image_dir, compile=True), exact.pixels) < WITHIN
        assert graphs
        cached = chain.through(QwenImageDenoiser(context(qwen_image_dir, compile=True))).run(asked)[0]
    assert apart(cached, chain.run(asked)[0].pixels) < WITHIN, "hooks are outside of what is compiled"


def test_all_is_compiled_before_the_first_request(chain: Chain, qwen_image_dir: Path) -> None:
    """Guided, with texts of other lengths (a mask), in other sizes."""
    plain = {name: value for name, value in ASKED.items() if name != "negative_prompt"}
    with compiled_eagerly() as graphs:
        denoiser = QwenImageDenoiser(context(qwen_image_dir, compile=True))
        with torch.inference_mode():
            denoiser.warm_up()
        before = len(graphs)
        assert before
        served = chain.through(denoiser)
        served.run({**ASKED, "negative_prompt": "grey, and without any colour at all", "true_cfg_scale": 2.0})
        served.run({**plain, "height": 96, "width": 64})
        assert len(graphs) == before


def test_weights_that_wait_elsewhere(qwen_image_dir: Path) -> None:
    plain = load_component(context(qwen_image_dir), "transformer")
    moved = load_component(context(qwen_image_dir), "transformer")
    offload(moved, torch.device("cpu"))
    given = {
        "hidden_states": torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0)),
        "encoder_hidden_states": torch.ones(1, 3, 64),
        "timestep": torch.tensor([0.3]),
        "img_shapes": [[(1, 4, 4)]],
    }
    with torch.inference_mode():
        assert torch.equal(plain(**given, return_dict=False)[0], moved(**given, return_dict=False)[0])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"attention": "sage"}, "attention is 'sage', which needs a GPU; on a CPU it must be auto or native"),
        ({"quantization": "int8", "lora": LoraPlan({}, 64, 16)}, "quantization does not go with lora"),
        ({"offload": "layerwise", "compile": True}, "offload does not go with compile"),
    ],
)
def test_what_cannot_be_is_named(qwen_image_dir: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_network(context(qwen_image_dir, **keys), "transformer")
    assert caught.value.field == f"stages.denoiser.{next(iter(keys))}"


def test_attention_that_is_not_installed_is_named(qwen_image_dir: Path) -> None:
    network = load_component(context(qwen_image_dir), "transformer")
    from segue.models.shared.diffusion.denoiser.tuning import _set_attention

    with pytest.raises(ConfigError, match=r"attention is 'flash_3'.*missing package"):
        _set_attention(network, context(qwen_image_dir, attention="flash_3", device=torch.device("cuda")))


@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
def test_recorded_calls(chain: Chain, qwen_image_dir: Path, exact: Made) -> None:
    """From the third of a kind on; of a step cache they are launched one by one."""
    replayed: list[int] = []

    class Counted(CpuRecorder):
        def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
            recorded, made = super().record(call, given)

            def counted() -> None:
                replayed.append(len(recorded.made[0]))
                recorded.run()

            return replace(recorded, run=counted), made

    network = QwenImageDenoiser(replace(context(qwen_image_dir), recorded=False))
    network.network.forward = NetworkGraphs(network.network.forward, torch.device("cpu"), Counted(libraries()[0]))
    recorded = chain.through(network)
    cached = {**ASKED, "step_cache": "first_block"}
    assert apart(recorded.run(ASKED)[0], exact.pixels) < WITHIN
    assert replayed == [2]
    one, other = recorded.run(ASKED, {**ASKED, "seed": 4})
    assert apart(one, exact.pixels) < WITHIN
    assert apart(other, exact.pixels) > 10 * WITHIN
    assert 4 in replayed
    before = len(replayed)
    without = recorded.run(cached)[0]
    assert len(replayed) == before
    assert apart(without, chain.run(cached)[0].pixels) < WITHIN
