"""Pipelines that no family names, taken apart by diffusers' modular blocks: the same images as the pipeline whole."""

from __future__ import annotations

import inspect
import re
import threading
from functools import partial
from itertools import chain as chained
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusion_chain import WITHIN, Chain, Made, expected, pipeline_of, quiet
from PIL import Image

from segue.connectors.payload import measure
from segue.engines.contract import StageRequest
from segue.engines.module.engine import ModuleEngine
from segue.graph.render import as_mermaid, as_text
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed, TooLarge
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK
from segue.models.images.generic_pipeline.blocks import GUIDANCE, taken
from segue.models.images.generic_pipeline.graph import graph
from segue.models.images.generic_pipeline.library import PipelineState, default_blocks
from segue.models.images.generic_pipeline.signature import Signature
from segue.models.images.generic_pipeline.splits import (
    DECODER_STAGE,
    DENOISER_STAGE,
    IMAGE_STAGE,
    SPLITS,
    TEXT_STAGE,
    split_of,
)
from segue.models.images.generic_pipeline.state import pack, unpack
from tiny_pipelines import SPLIT_MAKERS, ltx

pytestmark = [  # diffusers' schedulers and numpy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning"),
]

COMMON = {"prompt": "a small boat left the harbour", "negative_prompt": "grey", "guidance_scale": 3.0, "seed": 3}
VIDEO = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": 3, "max_sequence_length": 64}
ASKED: dict[str, dict[str, Any]] = {
    "LTXPipeline": {**COMMON, **VIDEO, "options": {"frame_rate": 20}},
    "ErnieImagePipeline": {**COMMON, "height": 64, "width": 48, "num_inference_steps": 3},
    "HunyuanVideo15Pipeline": {  # what is quoted is read by another encoder; guidance is the checkpoint's own
        **{key: value for key, value in COMMON.items() if key != "guidance_scale"},
        "prompt": 'a small boat left the "harbour"',
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,  # of 2177 tokens
    },
    "Krea2Pipeline": {  # what goes before a prompt takes some 150 tokens of these tokenizers
        **COMMON,
        "height": 32,
        "width": 32,
        "num_inference_steps": 3,
        "max_sequence_length": 192,
    },
}
COUNTS = {"LTXPipeline": "num_videos_per_prompt", "HunyuanVideo15Pipeline": "num_videos_per_prompt"}
VIDEOS = frozenset(COUNTS)
TEXT_PARTS = {"HunyuanVideo15Pipeline": {"text_encoder", "text_encoder_2"}}
WRONG_TYPE = {"ErnieImagePipeline": "use_pe", "HunyuanVideo15Pipeline": "num_frames"}
"""An argument that is no text."""
WEIGHTS = (
    (TEXT_STAGE, "text_encoder", r"(embed_tokens|shared)\.weight"),
    (DENOISER_STAGE, "transformer", r"to_v\.weight"),
    (DECODER_STAGE, "vae", r"decoder\.conv_out"),
)


@pytest.fixture(scope="module", params=list(SPLIT_MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(kind)
    with torch.random.fork_rng(devices=[]):
        SPLIT_MAKERS[kind](made)
    return made


@pytest.fixture(scope="module")
def chain(directory: Path) -> Chain:
    with quiet():
        return Chain(directory)


def apart(made: Made, theirs: list[torch.Tensor]) -> float:
    """Largest difference of a pixel in [0, 1], what rounding to 256 levels does not account for; infinite where the
    shapes differ."""
    if [made.shown[index].shape for index in sorted(made.shown)] != [one.shape for one in theirs]:
        return float("inf")
    return (
        max(float(np.abs(made.shown[index] / 255 - one.numpy()).max()) for index, one in enumerate(theirs)) - 0.5 / 255
    )


def reference(kind: str, pipeline: Any, asked: dict[str, Any]) -> list[torch.Tensor]:
    given = {key: value for key, value in asked.items() if key not in ("options", "num_images_per_prompt")}
    given |= asked.get("options", {})
    if "num_images_per_prompt" in asked:
        given[COUNTS.get(kind, "num_images_per_prompt")] = asked["num_images_per_prompt"]
    return expected(pipeline, given)


def test_what_the_pipeline_makes(kind: str, directory: Path, chain: Chain) -> None:
    """Of one, of two that take turns, of several outputs; and not of another seed, prompt or weight."""
    pipeline = pipeline_of(directory, kind)
    one, steps = ASKED[kind], ASKED[kind]["num_inference_steps"]
    several = {} if SPLITS[kind].one_output else {"num_images_per_prompt": 2}
    other = {**one, "prompt": "seven brothers", **several, "num_inference_steps": steps + 1, "seed": 4}
    guided = "guidance_scale" in one
    together = [one, other, *([{**one, "guidance_scale": 0.5}] if guided else [])]
    theirs = [reference(kind, pipeline, asked) for asked in together]
    assert all(float(image.std()) > 0.02 for image in theirs[0]), "not grey"
    [alone] = chain.run(one)
    assert apart(alone, theirs[0]) < WITHIN
    assert alone.progress == [(0, step + 1) for step in range(steps)]
    made = chain.run(*together)
    assert max(apart(mine, wanted) for mine, wanted in zip(made, theirs, strict=True)) < WITHIN
    changes: list[dict[str, Any]] = [{"seed": 8}, {"prompt": "a small boot"}, {"negative_prompt": "green"}]
    for changed in [*changes, *([{"guidance_scale": 3.5}] if guided else [])]:
        [mine] = chain.run({**one, **changed})
        assert apart(mine, theirs[0]) > WITHIN, changed
    for stage, part, named in WEIGHTS:
        [weight, *_] = [one for name, one in _part(chain, stage, part).named_parameters() if re.search(named, name)]
        with torch.no_grad():
            weight.mul_(1.5)
            [mine] = chain.run(one)
            weight.div_(1.5)
        assert apart(mine, theirs[0]) > WITHIN, part


def _part(chain: Chain, stage: str, name: str) -> torch.nn.Module:
    network: torch.nn.Module = chain.adapters[stage]._blocks._pipeline.components[name]
    return network


def test_each_stage_holds_its_own_parts(kind: str, chain: Chain) -> None:
    held = {
        stage: {name for name, one in _everything(chain, stage) if not one.is_meta}
        for stage in (TEXT_STAGE, DENOISER_STAGE, DECODER_STAGE)
    }
    texts = TEXT_PARTS.get(kind, {"text_encoder"})
    assert held == {TEXT_STAGE: texts, DENOISER_STAGE: {"transformer"}, DECODER_STAGE: {"vae"}}


def _everything(chain: Chain, stage: str) -> list[tuple[str, torch.Tensor]]:
    pipeline = chain.adapters[stage]._blocks._pipeline
    return [
        (name, weight)
        for name, part in vars(pipeline).items()
        if isinstance(part, torch.nn.Module)
        for weight in part.parameters()
    ]


def test_refused(kind: str, chain: Chain) -> None:
    rounds = kind == "HunyuanVideo15Pipeline"  # sizes, to what it makes, without a word
    for wrong, field, says in (
        ({"options": {"negative_promt": "grey"}}, "negative_promt", "did you mean 'negative_prompt'"),
        ({"true_cfg_scale": 3.0}, "true_cfg_scale", kind),
        ({"options": {"output_type": "latent"}}, "output_type", kind),
        ({"options": {WRONG_TYPE.get(kind, "max_sequence_length"): "many"}}, "", "it must be"),
        ({"height": 4096, "width": 4096}, "height", "at most"),
        ({"num_inference_steps": 1000}, "num_inference_steps", "at most 200"),
        ({"scheduler": "Euler"}, "scheduler", "cannot sample this model"),
        ({"height": None}, "width", "have to be provided") if rounds else ({"height": 33}, "height", "divisible"),
        ({"image": np.zeros((8, 8, 3), dtype=np.uint8)}, "", "image"),
    ):
        with pytest.raises(InvalidRequest, match=says) as caught:
            chain.run({**ASKED[kind], **wrong})
        assert field in str(caught.value.field)
        assert isinstance(caught.value, TooLarge) == says.startswith("at most")


def test_several_outputs_of_a_network_that_makes_one(kind: str, directory: Path, chain: Chain) -> None:
    """Refused where the library's own pipeline fails, and nowhere else."""
    two = {**ASKED[kind], "num_images_per_prompt": 2, "num_inference_steps": 1}
    if not SPLITS[kind].one_output:
        assert len(chain.run(two)[0].shown) == 2
        return
    with pytest.raises(InvalidRequest, match="num_images_per_prompt is 2; HunyuanVideo15Pipeline makes one"):
        chain.run(two)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        reference(kind, pipeline_of(directory, kind), two)


def test_cancelled_between_steps(kind: str, chain: Chain) -> None:
    """It ends where it stands; who comes after gets what it gets alone. What goes over the edge can travel, and is what
    the denoiser reads."""
    [wanted] = chain.run(ASKED[kind])
    text, denoiser = (ModuleEngine(chain.adapters[stage]) for stage in (TEXT_STAGE, DENOISER_STAGE))
    asked = Request(request_id="gone", prompt="a house")
    arguments = {key: value for key, value in ASKED[kind].items() if key not in ("seed", "options")}
    payload = {"arguments": arguments, "outputs": 1, "scheduler": None, "steps": 50, "fps": 16.0}
    payload["arguments"]["num_inference_steps"] = 50
    for engine, stage, upstreams in ((text, TEXT_STAGE, {"input"}), (denoiser, DENOISER_STAGE, {"input", TEXT_STAGE})):
        ends: dict[str, frozenset[str]] = {"upstreams": frozenset(upstreams), "downstreams": frozenset()}
        engine.add(StageRequest("gone", stage, asked, FALLBACK, 0, to_client=frozenset(), **ends))
        engine.feed("gone", "input", payload, final=True)
    [encoded] = text.step()
    assert encoded.payload is not None
    assert measure(encoded.payload).size > 0
    names = set(encoded.payload["values"])
    assert {"prompt_embeds", "negative_prompt_embeds"} <= names
    assert not names & {"prompt", "negative_prompt"}
    denoiser.feed("gone", TEXT_STAGE, encoded.payload, final=True)
    told = [output.progress for _ in range(3) for output in denoiser.step()]
    assert told == [(1, 50), (2, 50), (3, 50)]
    denoiser.cancel("gone")
    assert not denoiser.has_work()
    assert not [thread for thread in threading.enumerate() if thread.name == "pipeline"]
    [again] = chain.run(ASKED[kind])
    assert all(np.array_equal(again.shown[index], wanted.shown[index]) for index in wanted.shown)


def test_the_graph_shows_whose_blocks_run(kind: str, chain: Chain) -> None:
    shown = as_text(chain.graph)
    modular = SPLITS[kind].kind
    assert f"{modular}: denoise" in shown
    assert f"{modular}: decode" in as_mermaid(chain.graph)
    assert "library_pipeline" not in shown
    assert chain.graph.gives == {"video" if kind in VIDEOS else "image"}


def test_an_image_goes_before(tmp_path: Path) -> None:
    """What the encoder of images draws, it draws first; requests without an image go beside it."""
    ltx(tmp_path, "LTXImageToVideoPipeline")
    with quiet():
        chain = Chain(tmp_path)
    assert IMAGE_STAGE in chain.graph.stages
    pipeline = pipeline_of(tmp_path, "LTXImageToVideoPipeline")
    coarse = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((40, 36), Image.Resampling.BICUBIC)
    asked = {**COMMON, **VIDEO, "image": image}
    theirs = expected(pipeline, asked)
    made, plain = chain.run(asked, {**COMMON, **VIDEO})
    assert apart(made, theirs) < WITHIN
    assert apart(plain, theirs) > WITHIN
    [other] = chain.run({**asked, "image": image.rotate(90)})
    assert apart(other, theirs) > WITHIN


@pytest.mark.parametrize("name", list(SPLITS))
def test_blocks_are_those_of_the_library(name: str) -> None:
    """In their order; they take all that the pipeline takes; those of images need nothing of texts; and each stage
    has the networks that its blocks compute with."""
    split, kind = SPLITS[name], getattr(diffusers, name)
    blocks = default_blocks(split.kind)
    named = [*split.texts, *split.images, *split.denoise, *split.decode]
    assert [block for block in blocks if block in named] == named
    left = set(blocks) - set(named)
    assert not left or not split.images
    assert all("image" in blocks[block].block_trigger_inputs for block in left), "only images are left out"
    signature = Signature(kind, {one.name: one.default for one in inspect.signature(kind.__call__).parameters.values()})
    read = set(chained(*(taken(block) for block in blocks.values())))
    given_by_guider = any(spec.name == "guider" for block in blocks.values() for spec in block.expected_components)
    arguments = {one for one in signature.free if not one.endswith("_mask")}  # of embeddings made elsewhere
    assert arguments - read <= (set(GUIDANCE) if given_by_guider else set())
    made = {param.name for block in split.texts for param in blocks[block].intermediate_outputs}
    assert not made & {param.name for block in split.images for param in blocks[block].inputs}
    parts = set(inspect.signature(kind.__init__).parameters) - {"scheduler", "tokenizer"}
    for names in split.stages.values():
        own = {spec.name for block in names for spec in blocks[block].expected_components}
        used = set(re.findall(r"components\.(\w+)\(", "".join(_source(blocks[block]) for block in names)))
        assert used & parts <= own, names


def _source(block: Any) -> str:
    return inspect.getsource(type(block)) + "".join(_source(part) for part in block.sub_blocks.values())


@pytest.mark.parametrize(
    ("index", "whole"),
    [
        ({"_class_name": "Krea2Pipeline", "patch_size": 2, "is_distilled": False}, False),
        ({"_class_name": "Krea2Pipeline", "is_distilled": True}, True),
        ({"_class_name": "Krea2Pipeline", "text_encoder_select_layers": [1, 2]}, True),
        ({"_class_name": "LTXPipeline", "vae": ["diffusers", "X"], "pe": [None, None]}, False),
        ({"_class_name": "LTXPipeline", "something": 3}, True),
        ({"_class_name": "HeliosPipeline"}, True),
    ],
)
def test_which_are_called_whole(index: dict[str, Any], whole: bool) -> None:
    assert (split_of(index) is None) == whole
    assert ("library_pipeline" in graph(index).stages) == whole


def test_a_checkpoint_without_a_part(tmp_path: Path) -> None:
    SPLIT_MAKERS["LTXPipeline"](tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(re.sub(r'"text_encoder": \[[^]]*\],', "", index.read_text()))
    with quiet(), pytest.raises(ConfigError, match="has no text_encoder"):
        Chain(tmp_path)


def test_a_state_on_its_way() -> None:
    """Values of all kinds arrive as they left, groups with them; what nobody reads stays, and what cannot travel is
    named."""
    state, arrived = PipelineState(), PipelineState()
    generator = torch.Generator().manual_seed(7)
    torch.randn(3, generator=generator)
    values = {
        "tensor": torch.arange(3.0),
        "pair": (1, [torch.ones(2), None]),
        "dtype": torch.bfloat16,
        "array": np.arange(4).reshape(2, 2),
        "settings": {"a": 2.5},
        "generator": generator,
        "unread": 3,
        "nothing": None,
    }
    for name, value in values.items():
        state.set(name, value)
    state.set("grouped", torch.zeros(1), "fields")
    payload = pack(state, frozenset(values) - {"unread"}, frozenset({"fields", "others"}))
    assert measure(payload).size > 0
    unpack(payload, arrived, torch.device("cpu"))
    assert set(arrived.values) == set(values) - {"unread", "nothing"} | {"grouped"}
    assert torch.equal(arrived.values["tensor"], values["tensor"])
    assert arrived.values["pair"][0] == 1
    assert arrived.values["pair"][1][1] is None
    assert arrived.values["dtype"] is torch.bfloat16
    assert arrived.values["settings"] == {"a": 2.5}
    assert np.array_equal(arrived.values["array"], values["array"])
    assert torch.equal(torch.randn(5, generator=arrived.values["generator"]), torch.randn(5, generator=generator))
    assert list(arrived.get_by_kwargs("fields")) == ["grouped"]
    state.set("call", partial(print))
    with pytest.raises(StageFailed, match="left call, a partial"):
        pack(state, frozenset({"call"}), frozenset())
