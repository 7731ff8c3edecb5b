"""The language model: its rows are those of the published code, under every condition of serving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mimo_audio_family import EMPTY, GREEDY_CODES, MOST, Case, Replies, Reply, cases, context
from mimo_audio_plain import Plain

from segue.messages.errors import ConfigError
from segue.models.speech.mimo_audio.llm import LLM
from segue.models.speech.mimo_audio.tiny.config import IDS

ENDS = {IDS["<|im_end|>"], IDS["<|endoftext|>"]}
CASES = list(cases().values())
ROWS = {case.name: case.rows for case in CASES}


@pytest.fixture(scope="module")
def llm(tiny_dir: Path) -> LLM:
    return LLM(context(tiny_dir, "llm", options=GREEDY_CODES))


def of(replies: dict[str, Reply]) -> dict[str, list[list[int]]]:
    return {name: one.rows for name, one in replies.items()}


def test_the_plain_reference_is_the_published_code(tiny_dir: Path) -> None:
    plain = Plain(tiny_dir, EMPTY)
    for case in CASES:
        ends = ENDS | ({IDS["<|eostm|>"]} if case.spoken else set())
        assert plain(case.prompt, ends, MOST) == case.rows, case.name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_alone(llm: LLM, case: Case) -> None:
    [reply] = Replies(llm)([case]).values()
    assert reply.rows == case.rows
    assert reply.finish == "stop"
    assert reply.sent == [row[1:] for row in case.rows]
    assert "<|" not in reply.text
    words = [row[0] for row in case.rows if row[0] != EMPTY][:-1]
    assert reply.text == llm.decode_text(words, skip_special_tokens=True) != ""


def test_replies_depend_on_the_prompt() -> None:
    assert len({len(rows) for rows in ROWS.values()}) > 10
    spoken = [tuple(row) for rows in ROWS.values() for row in rows if row[0] == EMPTY]
    assert len(set(spoken)) > 0.8 * len(spoken)


@pytest.mark.parametrize(
    "config",
    [{}, {"max_tokens_per_step": 7, "prefill_chunk": 5}, {"num_blocks": 40, "block_size": 8}],
    ids=["together", "chunks", "preempted"],
)
def test_in_a_batch(llm: LLM, config: dict) -> None:
    replies = Replies(llm, **config)
    assert of(replies(CASES)) == ROWS
    assert (replies.engine.stats()["preemptions_total"] > 0) == ("num_blocks" in config)


def test_after_a_prefix_hit(llm: LLM) -> None:
    """A conversation with recordings, and the reply itself, are found again; another recording is not."""
    replies, case = Replies(llm, block_size=4), cases()["answered again"]
    replies([case])
    [again] = replies([case]).values()
    assert (again.rows, again.cached > 50) == (case.rows, True)
    whole = Case("whole", case.prompt + case.rows[:-1], [], None, spoken=True)
    [longer] = replies([whole]).values()
    assert longer.cached >= len(whole.prompt) - 5
    assert longer.rows[0] == case.rows[-1]
    place = next(place for place, row in enumerate(case.prompt) if row[0] == EMPTY)
    changed = [list(row) for row in case.prompt]
    changed[place][9] = (changed[place][9] + 1) % 32
    [other] = replies([Case("other", changed, [], None, spoken=True)]).values()
    assert other.cached <= place
    assert other.rows != case.rows


@pytest.mark.parametrize("done", [1, 6, 20])
def test_after_the_worker_was_killed(llm: LLM, done: int) -> None:
    case = cases()["understood"]
    [again] = Replies(llm)([case], resume={case.name: case.rows[:done]}).values()
    assert again.rows == case.rows


@pytest.mark.parametrize(
    "part",
    [
        "decoder.model.layers.2.mlp",
        "input_local_transformer.layers.1.self_attn.o_proj",
        "speech_group_downcast",
        "hidden_states_downcast",
        "local_transformer.layers.1.mlp",
        "local_transformer_lm_heads.7",
        "speech_embeddings.5",
    ],
)
def test_every_part_counts(tiny_dir: Path, part: str) -> None:
    """One part gives other than it should: the rows are others."""
    spoilt, case = LLM(context(tiny_dir, "llm", options=GREEDY_CODES, fused=False)), cases()["understood"]
    spoilt.net.get_submodule(part).register_forward_hook(lambda module, given, out: 1.5 * out.roll(1, -1))
    assert of(Replies(spoilt)([case])) != {case.name: case.rows}


def test_codes_are_drawn_whatever_the_text(tiny_dir: Path) -> None:
    """With the published settings a greedy request draws its codes, the same ones in a batch and after a restart."""
    llm = LLM(context(tiny_dir, "llm"))
    [alone] = Replies(llm)([cases()["understood"]]).values()
    together = Replies(llm)(CASES)
    assert alone.rows == together["understood"].rows
    assert of(together) != ROWS
    [again] = Replies(llm)([cases()["understood"]], resume={"understood": alone.rows[:9]}).values()
    assert again.rows == alone.rows
    codes = torch.tensor([row[1:] for row in alone.rows if row[0] == EMPTY]).reshape(-1, 8)
    assert len(codes) > 0
    assert bool((codes < torch.tensor([32, 32, *[16] * 6])).all()), "the empty code is never drawn"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"audio_temperature": -1}, "audio_temperature is -1; it must be at least 0"),
        ({"audio_top_p": 0}, "audio_top_p is 0; it must be above 0 and at most 1"),
        ({"audio_top_k": 1.5}, "audio_top_k is 1.5; it must be an integer"),
        ({"audio_top": 1}, "the stage has no option 'audio_top'"),
    ],
)
def test_wrong_options_are_named(tiny_dir: Path, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(context(tiny_dir, "llm", options=options))
