"""The same reply as `generate`, for models that see or hear, under every condition of serving."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from multimodal_family import (
    FAMILIES,
    SEES,
    Case,
    Run,
    Stages,
    answer,
    cases_of,
    context,
    library_model,
    processed,
    request_of,
)

from segue.models.omni.multimodal_lm.stages import STAGE_MODELS
from segue.models.omni.multimodal_lm.tiny import presets as tiny

Made = tuple[Path, Stages, dict[str, list[int]]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("multimodal")


@cache
def _made(root: Path, family: str) -> Made:
    directory = root / family
    tiny.make(family, directory)
    expected = {case.name: answer(directory, processed(directory, case)) for case in cases_of(family)}
    return directory, Stages(directory), expected


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def made(checkpoints: Path, family: str) -> Made:
    return _made(checkpoints, family)


def test_the_prompt_is_the_librarys(made: Made, family: str) -> None:
    directory, stages, _ = made
    for case in cases_of(family):
        ids = stages.input.process(request_of(case))["token_ids"]
        assert torch.equal(ids, processed(directory, case)["input_ids"][0]), case.name


def test_one_by_one(made: Made, family: str) -> None:
    _, stages, expected = made
    for case in cases_of(family):
        assert Run(stages)([case]) == {case.name: expected[case.name]}


def test_replies_depend_on_the_media_and_some_end_by_themselves(made: Made, family: str) -> None:
    directory, _, expected = made
    assert len({tuple(reply) for reply in expected.values()}) == len(expected)
    assert any(len(reply) < 20 for reply in expected.values())
    # the same question about others of the same size
    case = cases_of(family)[1]
    others = [answer(directory, processed(directory, _another(case, seed))) for seed in (13, 25, 37)]
    assert len({tuple(reply) for reply in (expected[case.name], *others)}) == 4


def test_in_a_batch(made: Made, family: str) -> None:
    _, stages, expected = made
    assert Run(stages)(cases_of(family)) == expected


def test_with_chunked_prefill(made: Made, family: str) -> None:
    _, stages, expected = made
    assert Run(stages, max_tokens_per_step=19)(cases_of(family)) == expected


def test_after_a_prefix_hit(made: Made, family: str) -> None:
    _, stages, expected = made
    run = Run(stages)
    run(cases_of(family))
    assert run(cases_of(family)) == expected
    lengths = {case.name: len(stages.input.process(request_of(case))["token_ids"]) for case in cases_of(family)}
    assert all(run.cached[name] > length - 10 for name, length in lengths.items())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3-vision"], indirect=True)
def test_after_preemption(made: Made, family: str) -> None:
    _, stages, expected = made
    cases = cases_of(family)[:3]
    lengths = [len(stages.input.process(request_of(case))["token_ids"]) + 2 for case in cases]
    run = Run(stages, prefix_caching=False, block_size=4, num_blocks=sum(-(-length // 4) for length in lengths))
    assert run(cases) == {case.name: expected[case.name] for case in cases}
    assert run.engine.stats()["preemptions_total"] > 0


def test_another_medium_of_the_same_size_is_no_prefix_hit(made: Made, family: str) -> None:
    directory, stages, expected = made
    case = cases_of(family)[1]
    other = _another(case, 13)
    first, second = (stages.input.process(request_of(each)) for each in (case, other))
    assert torch.equal(first["token_ids"], second["token_ids"])
    run = Run(stages)
    run([case])
    reply = run([other])[case.name]
    assert run.cached[case.name] <= int(first["media"][0]["places"][0])
    assert reply == answer(directory, processed(directory, other))
    assert reply != expected[case.name]


@pytest.mark.parametrize("family", SEES, indirect=True)
def test_a_block_of_pixels_changes_the_reply(made: Made, family: str) -> None:
    _, stages, expected = made
    case = cases_of(family)[1]
    payload = stages.input.process(request_of(case))
    tensors = payload["media"][0]["tensors"]
    pixels = tensors["pixel_values"].clone()
    first = pixels.view(-1, *pixels.shape[-1 if pixels.ndim == 2 else -3 :])  # patches, or tiles
    first[: -(-len(first) // 8)] *= -1
    tensors["pixel_values"] = pixels
    run = Run(stages)
    payload["media"][0]["hash"] = b"another"  # as the input stage would have made it of such an image
    run.add(case.name, payload)
    assert run.finish([case.name])[case.name] != expected[case.name]


def test_one_weight_changed_changes_the_replies(made: Made, family: str) -> None:
    directory, _, expected = made
    spoilt = Stages(directory)
    with torch.no_grad():
        spoilt.llm._decoder.model.layers[0].input_layernorm.weight[0] += 1
    assert Run(spoilt)(cases_of(family)) != expected


def test_defaults_are_those_of_generate(made: Made) -> None:
    directory, stages, _ = made
    generation = library_model(directory).generation_config
    assert stages.llm.end_token_ids == set(generation.eos_token_id)
    assert stages.llm.default_sampling.temperature == 0.0


def _another(case: Case, step: int) -> Case:
    """Other media of the same sizes (these depend on the seed modulo 3, 4 and 2)."""
    return Case(case.name, case.text, tuple((kind, seed + 12 * (step // 12)) for kind, seed in case.media))


@pytest.mark.parametrize("family", ["qwen3-vl"], indirect=True)
def test_deep_features_count(made: Made, family: str) -> None:
    _, stages, expected = made
    case = cases_of(family)[1]
    payload = stages.input.process(request_of(case))
    run = Run(stages)
    flat = torch.tensor([1.0, 0.0, 0.0])[:, None]
    chunks = [
        ({"media": [{**medium, "rows": medium["rows"] * flat} for medium in chunk["media"]]}, final)
        for chunk, final in stages.encoded(payload)
    ]
    run.add(case.name, payload, chunks=chunks)
    assert run.finish([case.name])[case.name] != expected[case.name]


def test_random_weights_load_as_well(made: Made) -> None:
    directory, _, _ = made
    encoder, llm = (STAGE_MODELS[stage](context(directory, stage, load_format="dummy")) for stage in ("encoder", "llm"))
    assert llm.weight_bytes > 0
    assert not list(encoder._decoder.layers)
