"""The language model: its rows are those of the published code, under every condition of serving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mimo_audio_family import EMPTY, GREEDY_CODES, MOST, Case, Replies, Reply, cases, context, stage_request
from mimo_audio_plain import Plain

from segue.engines.autoregressive.sample.penalties import RowRules
from segue.engines.autoregressive.sample.sampler import RowSampler
from segue.engines.autoregressive.step.advance import Advance
from segue.messages.errors import ConfigError
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.speech.mimo_audio.llm import LLM
from segue.models.speech.mimo_audio.tiny.config import IDS

ENDS = {IDS["<|im_end|>"], IDS["<|endoftext|>"]}
CASES = list(cases().values())
ROWS = {case.name: case.rows for case in CASES}
SOME = CASES[::3]


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


SHOWN = ("answered again", "thought about")
"""One with recordings and a spoken reply, one with a written reply; the others are of the same kinds."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name in SHOWN else pytest.mark.nightly) for case in CASES],
    ids=lambda case: case.name,
)
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
    ("asked", "config"),
    [
        (CASES, {}),
        pytest.param(SOME, {"max_tokens_per_step": 7, "prefill_chunk": 5}, marks=pytest.mark.nightly),
        (SOME, {"num_blocks": 24, "block_size": 8}),
    ],
    ids=["together", "chunks", "preempted"],
)
def test_in_a_batch(llm: LLM, asked: list[Case], config: dict) -> None:
    replies = Replies(llm, **config)
    assert of(replies(asked)) == {case.name: case.rows for case in asked}
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


@pytest.mark.parametrize(
    "done", [6, pytest.param(1, marks=pytest.mark.nightly), pytest.param(20, marks=pytest.mark.nightly)]
)
def test_after_the_worker_was_killed(llm: LLM, done: int) -> None:
    case = cases()["understood"]
    [again] = Replies(llm)([case], resume={case.name: case.rows[:done]}).values()
    assert again.rows == case.rows


def test_patches_of_all_rows_as_where_calls_are_replayed_on_a_gpu(llm: LLM) -> None:
    """Rows of text then have patches, too, which are dropped."""
    hidden, ids = torch.randn(5, llm.net.decoder.config.hidden_size), torch.tensor([EMPTY, 7, 8, EMPTY, EMPTY])
    rules = RowRules(SamplingParams(), [], llm.vocab_size, ())
    samplers = [RowSampler(seed, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, rules=rules) for seed in range(5)]
    chosen, everywhere = (
        Advance(llm, llm.device, 8, padded=padded).rows(hidden, ids, samplers, range(5)) for padded in (False, True)
    )
    assert torch.equal(chosen[0], everywhere[0])
    assert chosen[1].all()
    assert everywhere[1].all()
    assert torch.equal(chosen[0][1:3, 1:], llm.silent.expand(2, -1))
    assert not torch.equal(chosen[0][0, 1:], llm.silent)


def test_a_deterministic_stage_gives_text_no_patches(llm: LLM) -> None:
    case = cases()["understood"]
    assert of(Replies(llm, deterministic=True)([case])) == {case.name: case.rows}


def test_quantized_weights(tiny_dir: Path) -> None:
    """Of the large decoder: the rows are others, and as long as codes need."""
    llm = LLM(context(tiny_dir, "llm", options=GREEDY_CODES, quantization="int8"))
    [reply] = Replies(llm)([cases()["understood"]], max_tokens=5).values()
    assert [len(row) for row in reply.rows] == [33] * 5


@pytest.mark.parametrize(
    "part",
    [
        "input_local_transformer.layers.1.self_attn.o_proj",
        "local_transformer_lm_heads.7",
        *(
            pytest.param(part, marks=pytest.mark.nightly)
            for part in (
                "decoder.model.layers.2.mlp",
                "speech_group_downcast",
                "hidden_states_downcast",
                "local_transformer.layers.1.mlp",
                "speech_embeddings.5",
            )
        ),
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
    together = Replies(llm)([cases()["answered"], cases()["understood"], cases()["said"]])
    assert alone.rows == together["understood"].rows != ROWS["understood"]
    [again] = Replies(llm)([cases()["understood"]], resume={"understood": alone.rows[:9]}).values()
    assert again.rows == alone.rows
    codes = torch.tensor([row[1:] for row in alone.rows if row[0] == EMPTY]).reshape(-1, 8)
    assert len(codes) > 0
    assert bool((codes < torch.tensor([32, 32, *[16] * 6])).all()), "the empty code is never drawn"


def test_few_shots_end_with_the_speech(llm: LLM) -> None:
    """Also if only their text is wanted; other written replies do not."""
    for options, ends in (({"few_shot": True}, [IDS["<|eostm|>"]]), ({}, [])):
        request = stage_request("llm", request=Request(request_id="r", options=options))
        llm.begin(request)
        assert request.sampling.stop_token_ids == ends


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
