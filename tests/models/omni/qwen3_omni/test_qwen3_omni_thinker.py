"""The same reply as `generate`, for prompts of every kind, under every condition of serving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from qwen3_omni_family import (
    BY_NAME,
    CASES,
    TOKENS,
    Run,
    Stages,
    context,
    expected,
    processed,
    request_of,
    sent,
    stage_request,
)

from segue.engines.contract import StageOutput
from segue.messages.errors import InvalidRequest
from segue.models.omni.qwen3_omni.thinker import Thinker


@pytest.fixture(scope="module")
def stages(tiny_dir: Path) -> Stages:
    return Stages.of(tiny_dir)


@pytest.fixture(scope="module")
def replies(tiny_dir: Path) -> dict[str, list[int]]:
    """The library's."""
    return {case.name: expected(tiny_dir, case) for case in CASES}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_prompt_and_the_reply_are_the_librarys(
    tiny_dir: Path, stages: Stages, replies: dict[str, list[int]], name: str
) -> None:
    case = BY_NAME[name]
    prompt = stages.input.process(request_of(case))["token_ids"]
    assert torch.equal(prompt, processed(tiny_dir, case)["input_ids"][0])
    assert Run(stages)([case]) == {name: replies[name]}


def test_replies_depend_on_the_prompt_and_some_end_by_themselves(replies: dict[str, list[int]]) -> None:
    assert len({tuple(reply) for reply in replies.values()}) == len(replies)
    assert any(len(reply) < TOKENS for reply in replies.values())


def test_in_a_batch(stages: Stages, replies: dict[str, list[int]]) -> None:
    assert Run(stages)(list(CASES)) == replies


def test_with_chunked_prefill(stages: Stages, replies: dict[str, list[int]]) -> None:
    assert Run(stages, max_tokens_per_step=37)(list(CASES)) == replies


def test_after_a_prefix_hit(stages: Stages, replies: dict[str, list[int]]) -> None:
    run = Run(stages)
    run(list(CASES))
    assert run(list(CASES)) == replies
    assert all(run.cached.values())


def test_another_image_is_no_prefix_hit(tiny_dir: Path, stages: Stages, replies: dict[str, list[int]]) -> None:
    case = BY_NAME["image"]
    other = replace(case, parts=(("image", 4), *case.parts[1:]))  # of the same size: the same ids
    assert torch.equal(processed(tiny_dir, case)["input_ids"], processed(tiny_dir, other)["input_ids"])
    run = Run(stages)
    run([case])
    assert run([other])[case.name] == expected(tiny_dir, other) != replies[case.name]


def test_deep_features_are_in_the_reply(stages: Stages, replies: dict[str, list[int]]) -> None:
    """Of all layers: the reply changes when one merger is another."""
    for merger in stages.encoder._net.visual.merger_list:
        stages.encoder.cache = type(stages.encoder.cache)(0)
        weight = merger.mlp[2].weight
        before = weight.clone()
        with torch.no_grad():
            weight.mul_(-1)
        changed = Run(stages)([BY_NAME["video"]])
        with torch.no_grad():
            weight.copy_(before)
        assert changed != {"video": replies["video"]}


def test_one_weight_of_an_expert_changes_the_reply(
    tiny_dir: Path, stages: Stages, replies: dict[str, list[int]]
) -> None:
    spoilt = Thinker(context(tiny_dir, "thinker"))
    with torch.no_grad():
        spoilt._decoder.model.layers[1].input_layernorm.weight[0] += 1
    assert Run(replace(stages, thinker=spoilt))(list(CASES)) != replies


def test_short_recordings_beside_long_ones_are_padded_as_in_one_call(tiny_dir: Path, stages: Stages) -> None:
    """A recording under a second has other rows next to a longer one: in the library, and so here."""
    alone, beside = (stages.input.process(request_of(case))["media"] for case in _SHORT)
    assert [item["width"] for item in alone] == [43]
    assert [item["width"] for item in beside] == [100, 100]
    assert len({item["hash"] for item in (*alone, *beside)}) == 3
    for case in _SHORT:
        assert Run(stages)([case]) == {case.name: expected(tiny_dir, case)}


_AUDIO = BY_NAME["audio"]
_SHORT = (
    replace(_AUDIO, name="short", parts=(("audio", 0), "what was said")),
    replace(_AUDIO, name="both", parts=(("audio", 0), ("audio", 3), "what was said")),
)


def test_a_pace_between_the_steps_of_its_clock_is_refused(stages: Stages) -> None:
    payload = stages.input.process(request_of(BY_NAME["video"]))
    payload["media"][0]["second_per_grid"] = 0.7
    facts = sent("input", "thinker", StageOutput("r", payload=payload, finished=True))
    state = stages.thinker.begin(stage_request("thinker", upstreams={"input", "encoder"}))
    stages.thinker.feed(state, "input", facts, final=True)
    [work] = stages.encoder.feed("r", "input", payload, final=True)
    [result] = stages.encoder.run([work])
    assert result.payload is not None
    with pytest.raises(InvalidRequest, match=r"one temporal patch per 0\.7 s, are not at whole steps"):
        stages.thinker.feed(state, "encoder", result.payload, final=True)


def test_defaults_are_those_of_generate(stages: Stages, tiny_dir: Path) -> None:
    assert stages.thinker.default_sampling.temperature == 0.0
    assert stages.thinker.default_sampling.max_tokens == 1024
    assert stages.thinker.end_token_ids == {expected(tiny_dir, BY_NAME["text"], 100)[-1]}
