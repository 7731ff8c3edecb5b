"""The backbone's latents are those of the library's own `generate` with the same noise, whatever happens to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from pocket_family import (
    CASES,
    GREEDY,
    SAMPLED,
    Speech,
    Spoken,
    context,
    noise_of,
    request_of,
)

from segue.messages.errors import ConfigError, InvalidRequest, NotFound
from segue.messages.request import Message, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.models.speech.pocket_tts.backbone import Backbone
from segue.models.speech.pocket_tts.ending import CROSSED, LAST, Ending, kind_logits
from segue.models.speech.pocket_tts.graph import check_library
from segue.models.speech.pocket_tts.input import InputProcessor
from segue.models.speech.pocket_tts.reference import Reference

from transformers.models.pocket_tts.generation_pocket_tts import PocketTTSEosThresholdCriteria  # isort: skip

WITHIN = 1e-4
SEED = 3


@pytest.fixture(scope="module")
def library(pocket_dir: Path) -> Reference:
    return Reference(pocket_dir)


@pytest.fixture(scope="module")
def input_stage(pocket_dir: Path) -> InputProcessor:
    return InputProcessor(context(pocket_dir, "input"))


@pytest.fixture(scope="module")
def backbone(pocket_dir: Path) -> Backbone:
    return Backbone(context(pocket_dir, "backbone"))


Expected = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def greedy(library: Reference) -> Expected:
    return {case.name: library.spoken(case.text, case.voice)[0] for case in CASES}


@pytest.fixture(scope="module")
def sampled(library: Reference) -> Expected:
    noise = noise_of(SEED, SAMPLED.temperature or 0.0)
    return {case.name: library.spoken(case.text, case.voice, noise=noise)[0] for case in CASES}


def apart(library: Reference, one: Spoken, expected: torch.Tensor) -> float:
    """Largest difference in the audio tokenizer's space; infinite if the lengths differ."""
    ours = library.model.denormalize_latents(one.latents)
    return float((ours - expected).abs().max()) if ours.shape == expected.shape else float("inf")


def test_alone(input_stage, backbone, library, greedy, sampled):
    for sampling, expected in ((GREEDY, greedy), (SAMPLED, sampled)):
        lengths = set()
        for case in CASES:
            spoken = Speech(input_stage, backbone)(case, sampling=sampling, seed=SEED)[case.name]
            assert apart(library, spoken, expected[case.name]) < WITHIN
            assert spoken.finish == "stop"
            assert [spoken.rows[-1][0], CROSSED in [row[0] for row in spoken.rows]] == [LAST, True]
            lengths.add(len(spoken.rows))
        assert len(lengths) >= 3


@pytest.mark.parametrize(
    "config",
    [{}, {"max_tokens_per_step": 9, "prefill_chunk": 5}, {"num_blocks": 10, "block_size": 8}],
    ids=["together", "chunks", "preempted"],
)
def test_together(input_stage, backbone, library, greedy, sampled, config):
    speech = Speech(input_stage, backbone, **{"block_size": 8, **config})
    for sampling, expected in ((GREEDY, greedy), (SAMPLED, sampled), (SAMPLED, sampled)):
        spoken = speech(*CASES, sampling=sampling, seed=SEED)
        for case in CASES:
            assert apart(library, spoken[case.name], expected[case.name]) < WITHIN
    stats = speech.engine.stats()
    assert (stats["preemptions_total"] > 0) == ("num_blocks" in config)
    if not config:
        assert spoken["sentence"].cached > 0


def test_resumed_after_each_row(input_stage, backbone, library, sampled):
    case = CASES[3]
    whole = Speech(input_stage, backbone)(case, sampling=SAMPLED, seed=SEED)[case.name]
    for known in range(len(whole.rows)):
        speech = Speech(input_stage, backbone)
        again = speech(case, sampling=SAMPLED, seed=SEED, resume={case.name: whole.rows[:known]})[case.name]
        assert again.rows[:known] == whole.rows[:known]
        assert apart(library, again, sampled[case.name]) < WITHIN


def test_what_changes_the_latents(input_stage, backbone, library, sampled, greedy, pocket_dir):
    """Other noise, another voice, one other weight: the comparison notices each."""
    case, other = CASES[0], CASES[1]
    speech = Speech(input_stage, backbone)
    assert apart(library, speech(case, sampling=SAMPLED, seed=SEED + 1)[case.name], sampled[case.name]) > WITHIN
    assert apart(library, speech(other)[other.name], greedy[case.name]) > WITHIN
    hotter = SamplingParams(temperature=0.75)
    assert apart(library, speech(case, sampling=hotter, seed=SEED)[case.name], sampled[case.name]) > WITHIN
    changed = Backbone(context(pocket_dir, "backbone"))
    with torch.inference_mode():
        changed.net.model.bos_latent[2] += 0.5
    assert apart(library, Speech(input_stage, changed)(case)[case.name], greedy[case.name]) > WITHIN


def test_frames_are_bounded(input_stage, backbone, library):
    """By `max_tokens`; else by the library's budget for a text of this length."""
    case = CASES[2]
    cut = SamplingParams(temperature=0.0, max_tokens=5)
    spoken = Speech(input_stage, backbone)(case, sampling=cut)[case.name]
    assert (len(spoken.rows), spoken.finish) == (5, "length")
    theirs = library.spoken(case.text, case.voice, max_new_tokens=5)[0]
    assert apart(library, spoken, theirs) < WITHIN


def test_without_an_end_the_budget_is_the_librarys(input_stage, pocket_dir, tmp_path):
    directory = tmp_path / "endless"
    shutil.copytree(pocket_dir, directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_threshold": 1e6}))
    case = CASES[0]
    spoken = Speech(input_stage, Backbone(context(directory, "backbone")))(case)[case.name]
    assert len(spoken.rows) == len(Reference(directory).spoken(case.text, case.voice)[0]) > 30


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("first", [0, 6])
def test_the_end_is_the_librarys(first, after):
    for seed in range(20):
        scores = torch.randn(40, generator=torch.Generator().manual_seed(seed))
        criterion = PocketTTSEosThresholdCriteria(1.5, after, first)
        library = [bool(criterion(torch.zeros(1, 1), score[None])) for score in scores]
        ending, kinds = Ending(first, after, None), []
        for place, score in enumerate(scores):
            logits = kind_logits(score[None], 1.5)[0]
            ending.apply(logits, place)
            kinds.append(int(logits.argmax()))
            ending.saw(kinds[-1])
        assert (kinds.index(LAST) if LAST in kinds else -1) == (library.index(True) if True in library else -1)


def test_what_is_refused_is_named(input_stage):
    asked = request_of(CASES[0])
    asked.voice = "nova"
    with pytest.raises(NotFound, match="voice is 'nova'; known: alba, marius"):
        input_stage.process(asked)
    marked = Request(request_id="r", messages=[Message("user", [TextPart("Hello <|audio_bos|> there")])])
    with pytest.raises(InvalidRequest, match="marks a place of the prompt"):
        input_stage.process(marked)
    with pytest.raises(ConfigError, match=r"pocket_tts needs transformers 5\.23; 5\.17\.0 is installed"):
        check_library("5.17.0")
    check_library("5.23.0")
