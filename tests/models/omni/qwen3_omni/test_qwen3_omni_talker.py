"""The talker: rows of codes and waveforms are those of `generate`, under every condition of serving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from qwen3_omni_family import BY_NAME, CASES, Speech, Spoken, Stages, context, expected_speech, stage_request

from segue.messages.errors import InvalidRequest, NotFound
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen3_omni.family import voices
from segue.models.omni.qwen3_omni.graph import graph
from segue.models.omni.qwen3_omni.talker import Talker
from segue.models.omni.qwen3_omni.vocoder import Code2Wav


@pytest.fixture(scope="module")
def stages(tiny_dir: Path) -> Stages:
    return Stages.of(tiny_dir)


@pytest.fixture(scope="module")
def talker(tiny_dir: Path) -> Talker:
    return Talker(context(tiny_dir, "talker"))


@pytest.fixture(scope="module")
def codes(tiny_dir: Path) -> dict[str, list[list[int]]]:
    """The library's."""
    return {case.name: expected_speech(tiny_dir, case)[1] for case in CASES}


def of(spoken: dict[str, Spoken]) -> dict[str, list[list[int]]]:
    return {name: one.codes for name, one in spoken.items()}


@pytest.mark.parametrize("name", BY_NAME)
def test_codes_and_samples_are_the_librarys(tiny_dir: Path, stages: Stages, talker: Talker, name: str) -> None:
    reply, codes, wave = expected_speech(tiny_dir, BY_NAME[name])
    [spoken] = Speech(stages, talker)([BY_NAME[name]]).values()
    assert spoken.reply == reply
    assert spoken.codes == codes
    vocoder = Code2Wav(context(tiny_dir, "vocoder"))
    state, _ = vocoder.begin(stage_request("vocoder", upstreams={"talker"}))
    works = vocoder.feed(state, "talker", {"codes": torch.tensor(spoken.codes), "start": 0}, final=True)
    made = [vocoder.run([work])[0].payload for work in works]
    samples = torch.cat([payload["samples"] for payload in made if payload is not None])
    torch.testing.assert_close(samples, wave, atol=1e-4, rtol=0)


def test_speech_depends_on_the_prompt_and_ends_by_itself(stages: Stages, talker: Talker, codes: dict) -> None:
    assert len({str(rows) for rows in codes.values()}) == len(codes)
    assert all(one.finish == "stop" for one in Speech(stages, talker)(list(CASES)).values())
    groups = torch.tensor(codes["mixed"]).T
    assert all(len(group.unique()) > 5 for group in groups)


def test_in_a_batch(stages: Stages, talker: Talker, codes: dict) -> None:
    assert of(Speech(stages, talker)(list(CASES))) == codes


def test_with_chunked_prefill(stages: Stages, talker: Talker, codes: dict) -> None:
    assert of(Speech(stages, talker, max_tokens_per_step=37)(list(CASES))) == codes


def test_after_a_prefix_hit(stages: Stages, talker: Talker, codes: dict) -> None:
    """The rows of tokens that the thinker did not compute again come from its cache."""
    speech = Speech(stages, talker)
    speech(list(CASES))
    assert of(speech(list(CASES))) == codes


def test_continued_after_the_worker_was_killed(stages: Stages, talker: Talker, codes: dict) -> None:
    cases = [BY_NAME[name] for name in ("text", "image", "mixed")]
    whole = Speech(stages, talker)(cases)
    resume = {name: one.talked[: 5 + index] for index, (name, one) in enumerate(whole.items())}
    assert of(Speech(stages, talker)(cases, resume=resume)) == {case.name: codes[case.name] for case in cases}


def test_another_voice(tiny_dir: Path, stages: Stages, talker: Talker, codes: dict) -> None:
    assert voices(tiny_dir) == ["Ethan", "Aiden", "Chelsie"]
    case = BY_NAME["image"]
    [spoken] = Speech(stages, talker)([case], voice="Aiden").values()
    assert spoken.codes == expected_speech(tiny_dir, case, "Aiden")[1] != codes[case.name]


@pytest.mark.parametrize(
    ("part", "case"),
    [
        ("code_predictor.model.layers.1.mlp", "text"),
        ("hidden_projection", "image"),
        ("model.layers.1.mlp.shared_expert", "audio"),
    ],
)
def test_every_part_is_heard(tiny_dir: Path, stages: Stages, codes: dict, part: str, case: str) -> None:
    """One part of the talker gives more than it should: the codes are others."""
    spoilt = Talker(context(tiny_dir, "talker"))
    spoilt.net.get_submodule(part).register_forward_hook(lambda module, given, out: 1.5 * out)
    assert of(Speech(stages, spoilt)([BY_NAME[case]])) != {case: codes[case]}


def test_a_reply_of_one_token_is_not_spoken(tiny_dir: Path, talker: Talker) -> None:
    ids = torch.tensor([641, 674, 198, 5, 642, 198, 641, 624, 198])
    state = talker.begin(stage_request("talker", upstreams={"thinker"}))
    payload = {"rows_start": 0, "rows": torch.randn(len(ids), 64), "prompt": {"token_ids": ids, "media": []}}
    assert talker.feed(state, "thinker", {**payload, "reply": 0}, final=False).prompt is None
    assert talker.feed(state, "thinker", {"reply": 1}, final=True).nothing


@pytest.mark.parametrize(
    ("ids", "message"), [([5, 6, 7], "no turn of the assistant"), ([641, 624, 198, 5], "no turn of the user")]
)
def test_a_prompt_without_turns_is_not_spoken(talker: Talker, ids: list[int], message: str) -> None:
    state = talker.begin(stage_request("talker", upstreams={"thinker"}))
    facts = {"token_ids": torch.tensor(ids), "media": []}
    payload = {"rows_start": 0, "rows": torch.randn(len(ids) + 4, 64), "prompt": facts, "reply": 1}
    with pytest.raises(InvalidRequest, match=message):
        talker.feed(state, "thinker", payload, final=False)


def test_unknown_voices_and_forbidden_codes(talker: Talker) -> None:
    request = Request(request_id="r", voice="Ethen")
    with pytest.raises(NotFound, match="did you mean 'Ethan'"):
        talker.begin(stage_request("talker", upstreams={"thinker"}, request=request))
    sampling = SamplingParams(suppress_tokens=list(range(64)))
    with pytest.raises(InvalidRequest, match="leaves none of the 64 codes"):
        talker.begin(stage_request("talker", upstreams={"thinker"}, sampling=sampling))


def test_a_checkpoint_without_a_talker_has_two_stages(tiny_dir: Path) -> None:
    silent = graph({"enable_audio_output": False})
    assert {"encoder", "thinker"} <= silent.stages.keys()
    assert not {"talker", "vocoder"} & silent.stages.keys()
    assert {"talker", "vocoder"} <= graph({}).stages.keys()
