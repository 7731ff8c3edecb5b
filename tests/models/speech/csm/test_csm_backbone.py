"""The backbone: rows of codes and waveforms are those of `generate`, under every condition of serving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from csm_family import (
    BY_NAME,
    CASES,
    GREEDY,
    Case,
    Speech,
    Spoken,
    Stages,
    Turn,
    context,
    expected,
    library_model,
    stage_request,
)

from segue.engines.autoregressive.contract import Draws
from segue.messages.errors import ConfigError, NotFound
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.shared.library import GenerationConfig
from segue.models.shared.speech.code_predictor import Filters
from segue.models.speech.csm.backbone import Backbone
from segue.models.speech.csm.codec import Vocoder
from segue.models.speech.csm.depth import depth_sampling


@pytest.fixture(scope="module")
def stages(tiny_dir: Path) -> Stages:
    return Stages.of(tiny_dir)


@pytest.fixture(scope="module")
def rows(tiny_dir: Path) -> dict[str, list[list[int]]]:
    """The library's."""
    return {case.name: expected(tiny_dir, case)[0] for case in CASES}


def of(spoken: dict[str, Spoken]) -> dict[str, list[list[int]]]:
    return {name: one.rows for name, one in spoken.items()}


@pytest.mark.parametrize("name", BY_NAME)
def test_rows_and_samples_are_the_librarys(tiny_dir: Path, stages: Stages, name: str) -> None:
    rows, wave = expected(tiny_dir, BY_NAME[name])
    [spoken] = Speech(stages)([BY_NAME[name]]).values()
    assert spoken.rows == rows
    assert len(spoken.sent) == len(rows) - 1, "the row that ends the utterance is not spoken"
    vocoder = Vocoder(context(tiny_dir, "vocoder"))
    state, _ = vocoder.begin(stage_request("vocoder", upstreams={"backbone"}))
    works = vocoder.feed(state, "backbone", {"codes": torch.tensor(spoken.sent), "start": 0}, final=True)
    made = [vocoder.run([work])[0].payload for work in works]
    samples = torch.cat([payload["samples"] for payload in made if payload is not None])
    torch.testing.assert_close(samples, wave, atol=1e-4, rtol=0)


def test_speech_depends_on_the_prompt_and_ends_by_itself(stages: Stages, rows: dict) -> None:
    assert len({len(one) for one in rows.values()}) == len(rows)
    assert all(one.finish == "stop" for one in Speech(stages)(list(CASES)).values())
    groups = torch.tensor(rows["another voice"]).T
    assert all(len(group.unique()) > 10 for group in groups)


@pytest.mark.parametrize(
    "config",
    [{}, {"max_tokens_per_step": 7, "prefill_chunk": 5}, {"num_blocks": 11, "block_size": 16}],
    ids=["together", "chunks", "preempted"],
)
def test_in_a_batch(stages: Stages, rows: dict, config: dict) -> None:
    speech = Speech(stages, **config)
    assert of(speech(list(CASES))) == rows
    assert (speech.engine.stats()["preemptions_total"] > 0) == ("num_blocks" in config)


def test_after_a_prefix_hit(stages: Stages, rows: dict) -> None:
    """Texts and recordings are found in the cache; the same text after another recording is not."""
    speech = Speech(stages, block_size=4)
    speech(list(CASES))
    again = speech(list(CASES))
    assert of(again) == rows
    assert all(one.cached >= 4 for one in again.values())
    first, last = BY_NAME["heard before"].turns
    [other] = speech([Case("other", (Turn(first.speaker, first.text, first.samples - 1), last))]).values()
    assert other.cached < again["heard before"].cached


def test_continued_after_the_worker_was_killed(stages: Stages, rows: dict) -> None:
    resume = {name: one[: 3 + index] for index, (name, one) in enumerate(rows.items())}
    assert of(Speech(stages)(list(CASES), resume=resume)) == rows


def test_draws_come_from_the_seed_and_the_checkpoints_settings(stages: Stages, rows: dict) -> None:
    drawn = SamplingParams(max_tokens=20)
    case = BY_NAME["words"]
    made = {seed: Speech(stages)([case], drawn, seed=seed)["words"].rows for seed in (1, 2)}
    assert made[1] != made[2] != rows["words"][:20]
    together = Speech(stages)([BY_NAME["sentence"], case], drawn, seed=1)
    assert together["words"].rows == made[1]
    assert (stages.backbone.default_sampling.temperature, stages.backbone.default_sampling.top_k) == (0.9, 50)


def test_codes_after_the_first_have_the_librarys_distribution(tiny_dir: Path, stages: Stages) -> None:
    """Temperature 0.9 and the 50 likeliest of the codec's 64, for evenly spread random numbers."""
    count, first = 4000, 17
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    numbers = torch.full((count, 7), 0.5, dtype=torch.float64)
    numbers[:, 0] = (torch.arange(count) + 0.5) / count
    draws = Draws(numbers, torch.zeros(count, dtype=torch.bool), torch.ones(count, 3, dtype=torch.float64))
    ids = torch.full((count,), first)
    codes = stages.backbone.advance(hidden.expand(count, -1), ids, draws)[:, 0]
    with torch.no_grad():
        scores = library_model(tiny_dir).depth_decoder(torch.tensor([[0, first]]), hidden).logits[0, -1] / 0.9
    scores[64:] = -torch.inf
    scores[scores < scores.topk(50).values[-1]] = -torch.inf
    drawn = torch.bincount(codes, minlength=len(scores)) / count
    torch.testing.assert_close(drawn, scores.softmax(-1), atol=1 / count, rtol=0)


@pytest.mark.parametrize(
    ("settings", "filters"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8}, Filters(0.7, 9, 0.8)),
        ({"do_sample": True}, Filters(1.0, 50, 1.0)),
        ({"temperature": 0.7}, Filters(1.0, 1, 1.0)),
    ],
)
def test_the_depth_decoder_has_settings_of_its_own(settings: dict, filters: Filters) -> None:
    given = {f"depth_decoder_{name}": value for name, value in settings.items()}
    assert depth_sampling(GenerationConfig(temperature=0.3, **given)) == filters


def test_settings_that_are_not_applied_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"depth_decoder_min_p is 0\.1, which is not supported"):
        depth_sampling(GenerationConfig(depth_decoder_do_sample=True, depth_decoder_min_p=0.1))


@pytest.mark.parametrize("part", ["depth_decoder.model.layers.1.mlp", "backbone_model.layers.2.mlp"])
def test_every_part_is_heard(tiny_dir: Path, stages: Stages, rows: dict, part: str) -> None:
    """One part gives more than it should: the rows are others."""
    spoilt = Backbone(context(tiny_dir, "backbone"))
    spoilt.net.get_submodule(part).register_forward_hook(lambda module, given, out: 1.5 * out)
    spoken = of(Speech(stages.but(spoilt))([BY_NAME["sentence"]]))
    assert spoken["sentence"] != rows["sentence"]


def test_another_recording_is_heard(stages: Stages, rows: dict) -> None:
    first, last = BY_NAME["heard before"].turns
    other = Case("other", (Turn(first.speaker, first.text, first.samples - 1920), last))
    assert Speech(stages)([other])["other"].rows != rows["heard before"]


def test_a_recording_that_comes_again_is_taken_once(stages: Stages) -> None:
    """The encoder was started again."""
    state = stages.backbone.begin(stage_request("backbone", upstreams={"input", "encoder"}))
    chunks = [{"media": [{"index": index, "codes": torch.full((2 + index, 8), 1 + index)}]} for index in range(2)]
    assert stages.backbone.feed(state, "encoder", chunks[0], final=False).prompt is None
    assert stages.backbone.feed(state, "encoder", chunks[0], final=False).prompt is None
    ids = torch.tensor([640, 5, 641, 642, 643, 640, 6, 641, 642, 643, 640, 7, 641])
    assert stages.backbone.feed(state, "input", {"token_ids": ids}, final=True).prompt is None
    prompt = stages.backbone.feed(state, "encoder", chunks[1], final=True).prompt
    assert prompt is not None
    assert len(prompt.token_ids) == len(ids) + 1 + 2
    assert prompt.modality_tokens == {"text": len(ids) - 2, "audio": 5}
    assert prompt.identity is not None
    assert prompt.identity[3] == prompt.identity[4] != prompt.identity[5] == prompt.identity[12]


def test_with_quantised_weights(tiny_dir: Path, stages: Stages, rows: dict) -> None:
    """In the backbone; most first codes are the same."""
    quantised = Backbone(context(tiny_dir, "backbone", quantization="int8"))
    assert quantised.weight_bytes < 0.8 * stages.backbone.weight_bytes
    spoken = of(Speech(stages.but(quantised))(list(CASES), SamplingParams(max_tokens=1).over(GREEDY)))
    assert sum(spoken[name][0] == rows[name][0] for name in rows) > len(rows) / 2


def test_an_utterance_may_be_cut(stages: Stages, rows: dict) -> None:
    """All its rows are spoken, as in the library."""
    [spoken] = Speech(stages)([BY_NAME["words"]], SamplingParams(max_tokens=5).over(GREEDY)).values()
    assert (spoken.finish, spoken.sent) == ("length", rows["words"][:5])


def test_the_last_code_does_not_end_an_utterance(stages: Stages) -> None:
    """The library looks at all others."""
    ends = stages.backbone.ends
    assert ends([0] * 8)
    assert ends([0] * 7 + [5])
    assert not ends([0] * 6 + [5, 0])


def test_unknown_voices(stages: Stages) -> None:
    request = Request(request_id="r", voice="nova")
    with pytest.raises(NotFound, match="voice is 'nova'; known: 0, 1, "):
        stages.backbone.begin(stage_request("backbone", upstreams={"input"}, request=request))
