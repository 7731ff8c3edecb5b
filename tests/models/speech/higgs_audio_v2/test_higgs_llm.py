"""The language model: rows of codes are those of `generate`, under every condition of serving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from higgs_family import (
    BY_NAME,
    CASES,
    GREEDY,
    ROWS,
    Speech,
    Spoken,
    context,
    expected,
    library_model,
    prompt_ids,
    request_of,
    stage_request,
)

from segue.engines.autoregressive.contract import Draws
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.sampling import SamplingParams
from segue.models.shared.library import GenerationConfig
from segue.models.speech.higgs_audio_v2.heads import Heads, RepetitionRule, repetition_rule
from segue.models.speech.higgs_audio_v2.input import InputProcessor
from segue.models.speech.higgs_audio_v2.llm import LLM

BEGIN, END, BOOKS = 64, 65, 8
Stages = tuple[InputProcessor, LLM]


@pytest.fixture(scope="module")
def stages(tiny_dir: Path) -> Stages:
    return InputProcessor(context(tiny_dir, "input")), LLM(context(tiny_dir, "llm"))


@pytest.fixture(scope="module")
def rows(tiny_dir: Path) -> dict[str, list[list[int]]]:
    """The library's."""
    return {case.name: expected(tiny_dir, case) for case in CASES}


def of(spoken: dict[str, Spoken]) -> dict[str, list[list[int]]]:
    return {name: one.rows for name, one in spoken.items()}


def test_prompts_are_the_templates(tiny_dir: Path, stages: Stages) -> None:
    for case in CASES:
        assert stages[0].process(request_of(case))["token_ids"].tolist() == prompt_ids(tiny_dir, case)[0].tolist()


def test_rows_are_the_librarys_and_end_by_themselves(stages: Stages, rows: dict) -> None:
    """Each alone. The first row is the beginning, the last the end, and codebook k lags k rows."""
    for case in CASES:
        [spoken] = Speech(*stages, enforce_eager=True)([case]).values()
        assert spoken.rows == rows[case.name]
        assert (spoken.finish, len(spoken.sent)) == ("stop", len(spoken.rows) - 1)
        assert (set(spoken.rows[0]), set(spoken.rows[-1])) == ({BEGIN}, {END})
        assert [row.count(BEGIN) for row in spoken.rows[:BOOKS]] == [8, 7, 6, 5, 4, 3, 2, 1]
        assert [row.count(END) for row in spoken.rows[-BOOKS:]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len({len(one) for one in rows.values()}) == len(rows)


@pytest.mark.parametrize(
    "config",
    [{}, {"max_tokens_per_step": 7, "prefill_chunk": 5}, {"num_blocks": 10, "block_size": 16}],
    ids=["together", "chunks", "preempted"],
)
def test_in_a_batch(stages: Stages, rows: dict, config: dict) -> None:
    speech = Speech(*stages, enforce_eager=bool(config), **config)
    assert of(speech(list(CASES))) == rows
    assert (speech.engine.stats()["preemptions_total"] > 0) == ("num_blocks" in config)


def test_after_a_prefix_hit(stages: Stages, rows: dict) -> None:
    speech = Speech(*stages, block_size=4, enforce_eager=True)
    speech(list(CASES))
    again = speech(list(CASES))
    assert of(again) == rows
    assert all(one.cached >= 4 for one in again.values())


def test_continued_after_the_worker_was_killed(stages: Stages, rows: dict) -> None:
    """In the beginning, in the middle, and in the end. Sampled: the repetition rule, too, goes on as if nothing had
    happened."""
    for place in (1, 5, 12, -6, -1):
        resume = {name: one[:place] for name, one in rows.items()}
        assert of(Speech(*stages, enforce_eager=True)(list(CASES), resume=resume)) == rows
    drawn = SamplingParams(max_tokens=30)
    made = of(Speech(*stages, enforce_eager=True)(list(CASES), drawn, seed=3))
    resume = {name: one[: 5 + 4 * index] for index, (name, one) in enumerate(made.items())}
    assert of(Speech(*stages, enforce_eager=True)(list(CASES), drawn, seed=3, resume=resume)) == made


def test_draws_come_from_the_seed_and_the_requests_settings(stages: Stages, rows: dict) -> None:
    drawn, case = SamplingParams(max_tokens=30), BY_NAME["words"]
    made = {seed: Speech(*stages)([case], drawn, seed=seed)["words"].rows for seed in (1, 2)}
    assert made[1] != made[2] != rows["words"][:30]
    together = Speech(*stages, enforce_eager=True)([BY_NAME["greeting"], case], drawn, seed=1)
    assert together["words"].rows == made[1]
    likeliest = SamplingParams(max_tokens=ROWS, top_k=1)
    assert Speech(*stages)([case], likeliest, seed=1)["words"].rows[:9] == rows["words"][:9]
    default = stages[1].default_sampling
    assert (default.temperature, default.top_k, default.top_p) == (1.0, 50, 0.95)


def test_repeated_codes_are_drawn_again_as_in_the_library(tiny_dir: Path, stages: Stages) -> None:
    """From the whole distribution, for evenly spread random numbers; not for greedy requests."""
    count, book = 6000, 3
    heads = Heads(library_model(tiny_dir).audio_lm_head, library_model(tiny_dir).config, RepetitionRule(7, 2))
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        scores = heads.logits(hidden)[0, book]
    likeliest = int(scores.argmax())
    recent = torch.arange(BOOKS)[None, :, None].expand(count, -1, BOOKS).clone()
    recent[:, -1, book] = recent[:, -7, book] = likeliest
    numbers = torch.full((count, heads.draws_per_row), 0.5, dtype=torch.float64)
    numbers[:, BOOKS - 1 + book] = (torch.arange(count) + 0.5) / count
    filters = torch.tensor([[0.7, 1, 1.0]], dtype=torch.float64).expand(count, -1)

    def drawn(greedy: bool) -> torch.Tensor:
        draws = Draws(numbers, torch.full((count,), greedy), filters, recent=recent)
        with torch.no_grad():
            return heads(hidden.expand(count, -1), torch.zeros(count, dtype=torch.long), draws)[:, book]

    found = torch.bincount(drawn(False), minlength=len(scores)) / count
    torch.testing.assert_close(found, scores.softmax(-1), atol=1 / count, rtol=0)
    assert set(drawn(True).tolist()) == {likeliest}
    recent[:, -7, book] = likeliest - 1  # once within the window: it stays
    assert set(drawn(False).tolist()) == {likeliest}


def test_the_repetition_rule_is_the_checkpoints() -> None:
    assert repetition_rule(GenerationConfig(ras_win_len=7, ras_win_max_num_repeat=2)) == RepetitionRule(7, 2)
    assert repetition_rule(GenerationConfig(ras_win_len=7)) is None
    with pytest.raises(ConfigError, match="ras_win_len is 0; it must be at least 1"):
        repetition_rule(GenerationConfig(ras_win_len=0, ras_win_max_num_repeat=2))


@pytest.mark.parametrize("part", ["layers.1.mlp", "layers.1.audio_mlp", "layers.2.audio_input_layernorm"])
def test_every_part_is_heard(tiny_dir: Path, stages: Stages, rows: dict, part: str) -> None:
    """One part gives more than it should: the rows are others. Text takes its own layers, audio its own."""
    spoilt = LLM(context(tiny_dir, "llm"))
    spoilt.net.model.get_submodule(part).register_forward_hook(lambda module, given, out: 1.5 * out)
    spoken = of(Speech(stages[0], spoilt, enforce_eager=True)([BY_NAME["sentence"]]))
    assert spoken["sentence"] != rows["sentence"]


def test_with_quantised_weights(tiny_dir: Path, stages: Stages, rows: dict) -> None:
    """Most codes of the second row, the first that is drawn, are the same."""
    quantised = LLM(context(tiny_dir, "llm", quantization="int8"))
    assert quantised.weight_bytes < 0.8 * stages[1].weight_bytes
    spoken = of(Speech(stages[0], quantised)(list(CASES), SamplingParams(max_tokens=2).over(GREEDY)))
    assert sum(spoken[name][1] == rows[name][1] for name in rows) > len(rows) / 2


def test_an_utterance_may_be_cut(stages: Stages, rows: dict) -> None:
    [spoken] = Speech(*stages)([BY_NAME["words"]], SamplingParams(max_tokens=5).over(GREEDY)).values()
    assert (spoken.finish, spoken.sent) == ("length", rows["words"][:5])


@pytest.mark.parametrize(
    ("name", "value"), [("min_p", 0.1), ("repetition_penalty", 1.2), ("logit_bias", {3: 1.0}), ("bad_words", ["no"])]
)
def test_sampling_that_the_library_refuses(stages: Stages, name: str, value: object) -> None:
    sampling = SamplingParams(**{name: value})
    with pytest.raises(InvalidRequest, match=rf"sampling\.llm\.{name} is .*takes temperature, top_k and top_p only"):
        stages[1].begin(stage_request("llm", sampling=sampling))
