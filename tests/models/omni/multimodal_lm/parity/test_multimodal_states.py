"""Models that see, whose decoders keep a state: the replies of `generate`, also with few states and few blocks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import pytest
import torch
from multimodal_family import TEXT, Case, Run, Stages, answer, processed, request_of
from multimodal_others import make
from multimodal_states import STATES
from rank_process import Second

from segue.messages.errors import ConfigError
from segue.models.omni.multimodal_lm.llm import LLM
from segue.models.shared.library import AutoModelForMultimodalLM
from segue.parallel.group import Group
from segue.parallel.shard import shard

CASES = (
    TEXT,
    Case("picture", "what is this", (("image", 1),)),
    Case("other image", "what is this", (("image", 13),)),
    Case("images", "how do these differ", (("image", 2), ("image", 3))),
)


@pytest.fixture(scope="module", params=["qwen3_5", "lfm2_vl"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = str(request.param)
    return make(kind, tmp_path_factory.mktemp(kind), STATES[kind])


@pytest.fixture(scope="module")
def stages(directory: Path) -> Stages:
    return Stages(directory)


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[int]]:
    replies = {case.name: answer(directory, processed(directory, case)) for case in CASES}
    assert len({tuple(reply) for reply in replies.values()}) == len(CASES)
    return replies


@pytest.mark.parametrize("states", [0, 1, 3])
def test_after_preemption(stages: Stages, expected: dict[str, list[int]], states: int) -> None:
    lengths = [len(stages.input.process(request_of(case))["token_ids"]) + 2 for case in CASES]
    blocks = sum(-(-length // 4) for length in lengths)
    run = Run(stages, prefix_states=states, block_size=4, num_blocks=blocks, max_tokens_per_step=40)
    assert run(CASES) == expected
    assert run.engine.stats()["preemptions_total"] > 0
    assert run(CASES[::-1]) == expected


@pytest.mark.nightly  # test_causal_lm_states_ranks divides the same layers
def test_two_processes(directory: Path, stages: Stages, expected: dict[str, list[int]], second: Second) -> None:
    """What the mixers keep is whole on both; a model without a plan for its layers is refused."""
    if "lfm2" in directory.name:
        model = AutoModelForMultimodalLM.from_pretrained(directory)
        with pytest.raises(ConfigError, match=r"Lfm2Vl.*no tensor parallel plan") as caught:
            shard(model, model.tp_plan, model.config.get_text_config(), cast(Group, None))
        assert caught.value.field == "tensor_parallel"
        return
    alone = stages.llm
    with second.led(directory) as led:
        assert led.weight_bytes < alone.weight_bytes
        divided = copy.copy(stages)
        divided.llm = cast(LLM, led)
        run = Run(divided, max_tokens_per_step=19, prefix_states=40)
        assert run(CASES) == expected
        assert run(CASES) == expected
        assert all(run.cached.values())


def test_another_image_is_no_prefix_hit(stages: Stages, expected: dict[str, list[int]]) -> None:
    one, other = CASES[1], CASES[2]
    first, second = (stages.input.process(request_of(case)) for case in (one, other))
    assert torch.equal(first["token_ids"], second["token_ids"])
    run = Run(stages)
    assert run([one]) == {one.name: expected[one.name]}
    assert run([other]) == {other.name: expected[other.name]}
    assert run.cached[other.name] <= int(first["media"][0]["places"][0])
    assert run([one]) == {one.name: expected[one.name]}
    assert run.cached[one.name] > len(first["token_ids"]) - 10
