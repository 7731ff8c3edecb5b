"""Pipelines that no family names: whole in one stage, equal to the pipeline's own output; what they are asked for, and
what is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusion_chain import Chain, Made, expected, pipeline_of, quiet

from segue.engines.contract import StageRequest
from segue.engines.module.engine import ModuleEngine
from segue.graph.render import as_text
from segue.messages.errors import ConfigError, InvalidRequest, TooLarge
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.images.generic_pipeline.stepped import Stepped
from segue.models.registry import family_of, read_config
from tiny_pipelines import MAKERS

pytestmark = [  # diffusers' schedulers and numpy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
]

COMMON = {"prompt": "a small boat left the harbour", "negative_prompt": "grey", "guidance_scale": 3.0, "seed": 3}
ASKED: dict[str, dict[str, Any]] = {
    "StableDiffusionPipeline": {**COMMON, "height": 64, "width": 48, "num_inference_steps": 4},
    "PixArtSigmaPipeline": {
        **COMMON,
        "height": 64,
        "width": 48,
        "num_inference_steps": 3,
        "options": {"use_resolution_binning": False, "clean_caption": False},
    },
    "LTXConditionPipeline": {
        **COMMON,
        "height": 32,
        "width": 32,
        "num_frames": 9,
        "num_inference_steps": 3,
        "max_sequence_length": 64,
        "options": {"frame_rate": 20},
    },
}
COUNTS = {"LTXConditionPipeline": "num_videos_per_prompt"}


@pytest.fixture(scope="module", params=list(MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(kind)
    with torch.random.fork_rng(devices=[]):
        MAKERS[kind](made)
    return made


@pytest.fixture(scope="module")
def chain(directory: Path) -> Chain:
    with quiet():
        return Chain(directory)


@pytest.fixture(scope="module")
def pipeline(kind: str, directory: Path) -> Any:
    return pipeline_of(directory, kind)


def same(made: Made, theirs: list[torch.Tensor]) -> bool:
    """Level by level."""
    wanted = [(one.numpy() * 255).round().astype(np.uint8) for one in theirs]
    return len(made.shown) == len(wanted) and all(
        np.array_equal(made.shown[index], one) for index, one in enumerate(wanted)
    )


def reference(kind: str, pipeline: Any, asked: dict[str, Any]) -> list[torch.Tensor]:
    given = {key: value for key, value in asked.items() if key not in ("options", "num_images_per_prompt")}
    given |= asked.get("options", {})
    if "num_images_per_prompt" in asked:
        given[COUNTS.get(kind, "num_images_per_prompt")] = asked["num_images_per_prompt"]
    return expected(pipeline, given)


def test_what_the_pipeline_makes(kind: str, chain: Chain, pipeline: Any) -> None:
    """Of one, of two that take turns, of several outputs; and not of another seed, prompt or weight."""
    one = ASKED[kind]
    other = {**one, "prompt": "seven brothers", "num_images_per_prompt": 2, "num_inference_steps": 5, "seed": 4}
    theirs = [reference(kind, pipeline, asked) for asked in (one, other)]
    assert all(float(image.std()) > 0.02 for image in theirs[0]), "not grey"
    [alone] = chain.run(one)
    assert same(alone, theirs[0])
    assert alone.progress[-1][1] >= one["num_inference_steps"]
    both = chain.run(one, other)
    assert all(same(made, wanted) for made, wanted in zip(both, theirs, strict=True))
    for changed in ({"seed": 8}, {"prompt": "a small boot"}, {"negative_prompt": "green"}):
        [made] = chain.run({**one, **changed})
        assert not same(made, theirs[0]), changed
    weight = next(iter(_network(chain).parameters()))
    with torch.no_grad():
        weight.mul_(1.5)
        [made] = chain.run(one)
        weight.div_(1.5)
    assert not same(made, theirs[0])


def _network(chain: Chain) -> torch.nn.Module:
    parts = chain.adapters["library_pipeline"]._pipeline.components
    return parts.get("unet") or parts["transformer"]


def test_refused(kind: str, chain: Chain) -> None:
    for wrong, field, says in (
        ({"options": {"guidance_scal": 3.0}}, "guidance_scal", "did you mean 'guidance_scale'"),
        ({"true_cfg_scale": 3.0}, "true_cfg_scale", kind),
        ({"partial_images": 2}, "partial_images", kind),
        ({"options": {"callback_on_step_end": 3}}, "callback_on_step_end", kind),
        ({"options": {"prompt_embeds": [3.0]}}, "prompt_embeds", kind),
        ({"height": 4096, "width": 4096}, "height", "at most"),
        ({"num_inference_steps": 1000}, "num_inference_steps", "at most 200"),
        ({"scheduler": "Euler"}, "scheduler", "cannot sample this model"),
        ({"height": 33}, "height", "divisible"),
        ({"options": {"output_type": "latent"}}, "output_type", kind),
        ({"mask_image": np.zeros((8, 8, 3), dtype=np.uint8)}, "mask_image", "takes (no mask_image|text)"),
    ):
        with pytest.raises(InvalidRequest, match=says) as caught:
            chain.run({**ASKED[kind], **wrong})
        assert caught.value.field == field
        assert isinstance(caught.value, TooLarge) == says.startswith("at most")


def test_cancelled_between_steps(kind: str, directory: Path, chain: Chain) -> None:
    """It ends where it stands; who comes after gets what it gets alone."""
    adapter = chain.adapters["library_pipeline"]
    [wanted] = chain.run(ASKED[kind])
    engine = ModuleEngine(adapter)
    asked = Request(request_id="gone", prompt="a house")
    ends: dict[str, frozenset[str]] = {"upstreams": frozenset(("input",)), "downstreams": frozenset()}
    engine.add(StageRequest("gone", "library_pipeline", asked, FALLBACK, 0, to_client=frozenset(), **ends))
    arguments = {key: value for key, value in ASKED[kind].items() if key not in ("seed", "options")}
    arguments |= {**ASKED[kind].get("options", {}), "num_inference_steps": 50}
    payload = {"arguments": arguments, "images": {}, "outputs": 1, "scheduler": None, "steps": 50, "fps": 16.0}
    engine.feed("gone", "input", payload, final=True)
    told = [output.progress for _ in range(3) for output in engine.step()]
    assert told == [(1, 50), (2, 50), (3, 50)]
    engine.cancel("gone")
    assert not engine.has_work()
    assert not [thread for thread in threading.enumerate() if thread.name == "pipeline"]
    [again] = chain.run(ASKED[kind])
    assert all(np.array_equal(again.shown[index], wanted.shown[index]) for index in wanted.shown)


def test_the_graph_shows_it(kind: str, chain: Chain) -> None:
    shown = as_text(chain.graph)
    assert "generic_pipeline" in shown
    assert "library_pipeline  module" in shown
    assert f"diffusers' {kind}, whole" in shown
    assert chain.graph.gives == {"video" if kind == "LTXConditionPipeline" else "image"}


def test_another_scheduler(tmp_path: Path) -> None:
    MAKERS["StableDiffusionPipeline"](tmp_path)
    asked = {**ASKED["StableDiffusionPipeline"], "scheduler": "DDIMScheduler"}
    chain, pipeline = Chain(tmp_path), pipeline_of(tmp_path, "StableDiffusionPipeline")
    pipeline.scheduler = diffusers.DDIMScheduler.from_config(pipeline.scheduler.config)
    [made] = chain.run(asked)
    assert same(made, expected(pipeline, asked))


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"_class_name": "StableAudioPipeline"}, "generates audio"),
        ({"_class_name": "NoSuchPipeline"}, "has no pipeline"),
        ({"_class_name": "DDPMPipeline"}, "takes no prompt"),
    ],
)
def test_checkpoints_that_are_refused(tmp_path: Path, index: dict[str, Any], says: str) -> None:
    (tmp_path / "model_index.json").write_text(str({**index, "_diffusers_version": "0.42"}).replace("'", '"'))
    with pytest.raises(ConfigError, match=says):
        Chain(tmp_path)


@pytest.mark.parametrize("name", ["QwenImagePipeline", "StableDiffusionXLPipeline", "QwenImageEditPlusPipeline"])
def test_families_that_are_named_are_not_served_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / "model_index.json").write_text(f'{{"_class_name": "{name}", "_diffusers_version": "0.42"}}')
    assert family_of(read_config(tmp_path), tmp_path).name != "generic_pipeline"


def test_a_stepped_call_raises_and_ends() -> None:
    def call(pause: Any) -> int:
        pause()
        raise KeyError("in the middle")

    stepped = Stepped(call, torch.device("cpu"))
    stepped.advance()
    assert not stepped.done
    with pytest.raises(KeyError, match="in the middle"):
        stepped.advance()
    assert stepped.done
    stepped.give_up()
    Stepped(call, torch.device("cpu")).give_up()
