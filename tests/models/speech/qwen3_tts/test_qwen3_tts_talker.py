"""The talker: rows of codes are those of the package `qwen-tts`, under every condition of serving."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from qwen3_tts_family import Case, Speech, Spoken, cases, context, spoken_by, stage_request

from segue.messages.errors import InvalidRequest
from segue.messages.request import Appended, TextPart
from segue.models.speech.qwen3_tts.talker import Talker
from segue.orchestrator.spoken.words import Words


@pytest.fixture(scope="module")
def talker(tiny_dir: Path) -> Talker:
    return Talker(context(tiny_dir, "talker"))


@pytest.fixture(scope="module")
def codes() -> dict[str, list[list[int]]]:
    """The package's."""
    return {case.name: case.codes for case in spoken_by("custom_voice")}


def of(spoken: dict[str, Spoken]) -> dict[str, list[list[int]]]:
    return {name: one.codes for name, one in spoken.items()}


@pytest.mark.parametrize("case", spoken_by("custom_voice"), ids=lambda case: case.name)
def test_codes_are_the_packages(tiny_dir: Path, talker: Talker, case: Case) -> None:
    assert of(Speech(tiny_dir, talker)([case])) == {case.name: case.codes}


def test_a_described_voice(design_dir: Path) -> None:
    asked = spoken_by("voice_design")
    talker = Talker(context(design_dir, "talker"))
    assert talker.voices == []
    assert of(Speech(design_dir, talker)(asked)) == {case.name: case.codes for case in asked}


def test_utterances_depend_on_the_request_and_end_by_themselves(tiny_dir: Path, talker: Talker, codes: dict) -> None:
    assert len({str(rows) for rows in codes.values()}) == len(codes)
    assert len({len(rows) for rows in codes.values()}) > 2
    finish = {name: one.finish for name, one in Speech(tiny_dir, talker)(spoken_by("custom_voice")).items()}
    assert finish == {name: "length" if name == "cut" else "stop" for name in codes}
    for group in zip(*codes["plain"], strict=True):
        assert len(set(group)) > 5


def test_in_a_batch(tiny_dir: Path, talker: Talker, codes: dict) -> None:
    assert of(Speech(tiny_dir, talker)(spoken_by("custom_voice"))) == codes


def test_with_chunked_prefill(tiny_dir: Path, talker: Talker, codes: dict) -> None:
    assert of(Speech(tiny_dir, talker, max_tokens_per_step=7)(spoken_by("custom_voice"))) == codes


def test_after_a_prefix_hit(tiny_dir: Path, talker: Talker, codes: dict) -> None:
    """The same text in another voice has another prefix."""
    speech = Speech(tiny_dir, talker, block_size=4)
    speech(spoken_by("custom_voice"))
    again = speech(spoken_by("custom_voice"))
    assert of(again) == codes
    assert min(one.cached for one in again.values()) > 8


def test_preempted(tiny_dir: Path, talker: Talker, codes: dict) -> None:
    """The pool is too small for all at once: rows are computed again."""
    speech = Speech(tiny_dir, talker, num_blocks=12, block_size=16)
    assert of(speech(spoken_by("custom_voice"))) == codes
    assert speech.engine.stats()["preemptions_total"] > 0


def test_continued_after_the_worker_was_killed(tiny_dir: Path, talker: Talker, codes: dict) -> None:
    whole = Speech(tiny_dir, talker)(spoken_by("custom_voice"))
    resume = {name: one.talked[: 1 + 2 * index] for index, (name, one) in enumerate(whole.items()) if name != "cut"}
    asked = [cases()[name] for name in resume]
    assert of(Speech(tiny_dir, talker)(asked, resume=resume)) == {name: codes[name] for name in resume}


def test_sampled_rows_depend_on_the_seed_alone(tiny_dir: Path, talker: Talker, codes: dict) -> None:
    asked = spoken_by("custom_voice")
    together = of(Speech(tiny_dir, talker)(asked, temperature=0.9))
    assert together["plain"] != codes["plain"]
    assert of(Speech(tiny_dir, talker)([cases()["plain"]], temperature=0.9))["plain"] == together["plain"]


# --- a text that arrives --------------------------------------------------------------------------------------------


def text_of(case: Case) -> str:
    part = case.request.messages[0].content[0]
    assert isinstance(part, TextPart)
    return part.text


def in_pieces(text: str, size: int) -> list[str]:
    """As the server cuts a text that comes in pieces of so many characters."""
    words = Words()
    pieces = [piece for at in range(0, len(text), size) for piece in words.feed(text[at : at + size])]
    return [piece for piece in (*pieces, *words.finish()) if piece]


@pytest.mark.parametrize("size", [1, 9, 1000])
@pytest.mark.parametrize("case", spoken_by("custom_voice", arriving=True), ids=lambda case: case.name)
def test_a_text_that_arrives(tiny_dir: Path, talker: Talker, case: Case, size: int) -> None:
    """The codes are the package's, whatever the pieces; without its next token the talker waits."""
    pieces = in_pieces(text_of(case), size)
    spoken, waits = Speech(tiny_dir, talker).arriving(case, pieces)
    assert spoken.codes == case.codes
    assert spoken.finish == "stop"
    assert len(pieces) > 1
    assert waits >= (5 if size == 1 else 0)


def test_a_text_that_arrives_in_a_described_voice(design_dir: Path) -> None:
    speech = Speech(design_dir, Talker(context(design_dir, "talker")))
    for case in spoken_by("voice_design", arriving=True):
        assert speech.arriving(case, in_pieces(text_of(case), 4))[0].codes == case.codes


def test_a_text_that_arrives_after_the_worker_was_killed(tiny_dir: Path, talker: Talker) -> None:
    [case, *_] = spoken_by("custom_voice", arriving=True)
    pieces = in_pieces(text_of(case), 1)
    whole, _ = Speech(tiny_dir, talker).arriving(case, pieces)
    for done in (1, 4, len(whole.talked) - 1):
        again, _ = Speech(tiny_dir, talker, block_size=4).arriving(case, pieces, resume=whole.talked[:done])
        assert again.codes == case.codes


def test_what_cannot_be_appended(tiny_dir: Path, talker: Talker) -> None:
    speech = Speech(tiny_dir, talker)
    [case, *_] = spoken_by("custom_voice", arriving=True)
    request = msgspec.structs.replace(case.request, open=True)
    state, _ = speech.input.begin(stage_request("input", request))
    for piece, field in ((Appended(prompt_token_ids=[5]), "append"), (Appended(prompt="a", reply=True), "reply")):
        [work] = speech.input.feed(state, "client", {"piece": piece}, final=False)
        [result] = speech.input.run([work])
        assert isinstance(result.error, InvalidRequest)
        assert result.error.field == field


@pytest.mark.parametrize(
    "part",
    [
        "code_predictor.model.layers.1.mlp",
        "code_predictor.small_to_mtp_projection",
        "decoder.model.layers.1.self_attn.o_proj",
        "text_projection.linear_fc2",
    ],
)
def test_every_part_is_heard(tiny_dir: Path, codes: dict, part: str) -> None:
    """One part of the talker gives more than it should: the codes are others."""
    spoilt = Talker(context(tiny_dir, "talker", fused=False))
    spoilt.net.get_submodule(part).register_forward_hook(lambda module, given, out: 1.5 * out)
    assert of(Speech(tiny_dir, spoilt)([cases()["plain"]])) != {"plain": codes["plain"]}
