"""Stages driven by another one: per-token rows in, captured rows out, both without gaps whatever happens."""

from __future__ import annotations

import pytest
import torch
from ar_adapter import HIDDEN, ConditionedAdapter, Driver, TinyAdapter, prompts, stage_request, tiny_model

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Fed, Prompt
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.kernels.attention.paged_attention import NAME
from segue.messages.sampling import SamplingParams

PROMPTS = prompts(4, (5, 16, 33, 24))
TOKENS = 18
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
ROWS = [torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)) for count in (3, 9, 0, 30)]
TAIL = torch.linspace(-1, 1, HIDDEN)


@torch.inference_mode()
def plain_loop(model, prompt, rows=None, tail=None, tokens=TOKENS):
    """Without cache, batch or engine: (tokens, final hidden states of all tokens whose input was known)."""
    model.set_attn_implementation("eager")
    embeds, out = model.model.embed_tokens(torch.tensor(prompt)), []
    while True:
        hidden = model.model(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0]
        token = int(model.lm_head(hidden[-1]).argmax())
        out.append(token)
        if len(out) == tokens:
            model.set_attn_implementation(NAME)
            return out, hidden
        step = model.model.embed_tokens(torch.tensor([token]))
        if rows is not None:
            step = step + (rows[len(out) - 1] if len(out) <= len(rows) else tail)
        embeds = torch.cat([embeds, step])


@pytest.fixture(scope="module")
def talker():
    return ConditionedAdapter(tiny_model("qwen2", seed=3), capture=True)


@pytest.fixture(scope="module")
def spoken(talker):
    answers = [plain_loop(talker.model, *pair, TAIL) for pair in zip(PROMPTS, ROWS, strict=True)]
    unconditioned = [plain_loop(talker.model, prompt)[0] for prompt in PROMPTS]
    assert all(answer[0] != other for answer, other in zip(answers, unconditioned, strict=True))
    return answers


def driver(adapter, **config) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{"num_blocks": 64, "block_size": 8, **config})))


def start(drive: Driver, index: int, **fields) -> str:
    key = f"r{index}"
    drive.engine.add(stage_request(key, sampling=GREEDY, downstreams=frozenset({"next"}), **fields))
    return key


def check(drive: Driver, spoken, which=range(4)) -> None:
    for index in which:
        tokens, hidden = spoken[index]
        result = drive.results[f"r{index}"]
        assert result.token_ids == tokens
        # the input of the last token is never computed: its row is nobody's
        torch.testing.assert_close(result.rows(), hidden, rtol=1e-4, atol=1e-4)
        assert [output.prompt is not None for output in result.outputs if output.captured].count(True) == 1
        first = next(output for output in result.outputs if output.captured)
        assert first.prompt is not None
        assert first.prompt.token_ids == PROMPTS[index]


def test_everything_at_once(talker, spoken):
    drive = driver(talker)
    for index, prompt in enumerate(PROMPTS):
        key = start(drive, index)
        drive.engine.feed(key, "up", {"prompt": Prompt(prompt), "rows": ROWS[index], "tail": TAIL}, final=True)
    drive.run()
    check(drive, spoken)


@pytest.mark.parametrize("config", [{}, {"max_tokens_per_step": 7}, {"num_blocks": 9}, {"prefix_caching": False}])
def test_rows_late_and_in_pieces(talker, spoken, config):
    drive = driver(talker, **config)
    keys = [start(drive, index) for index in range(4)]
    assert not drive.engine.has_work()
    for key, rows in zip(keys, ROWS, strict=True):
        drive.engine.feed(key, "up", {"rows": rows[:1]}, final=False)  # rows may come before the prompt
    for key, prompt in zip(keys, PROMPTS, strict=True):
        drive.engine.feed(key, "up", {"prompt": Prompt(prompt)}, final=False)
    drive.run()  # as far as the rows reach: one token from the prompt, one more per row
    if "num_blocks" not in config:
        assert [len(drive.results[key].token_ids) for key in keys] == [2, 2, 1, 2]
    for begin, end in ((1, 2), (2, 6), (6, 7), (7, 30)):
        for key, rows in zip(keys, ROWS, strict=True):
            drive.engine.feed(key, "up", {"rows": rows[begin:end]}, final=False)
            drive.step()
        drive.run()
    for key in keys:
        drive.engine.feed(key, "up", {"tail": TAIL}, final=True)
    drive.run()
    check(drive, spoken)
    if config.get("num_blocks"):
        assert drive.engine.stats()["preemptions_total"] > 0


def test_prefix_hits_give_the_rows_they_did_not_compute(talker, spoken):
    drive = driver(talker)
    for _ in range(2):
        drive.results.clear()
        for index, prompt in enumerate(PROMPTS):
            key = start(drive, index)
            drive.engine.feed(key, "up", {"prompt": Prompt(prompt), "rows": ROWS[index], "tail": TAIL}, final=True)
        drive.run()
        check(drive, spoken)
    assert drive.engine.stats()["prefix_hit_tokens_total"] == 8 + 32 + 16


def test_preempted_rows_are_not_given_twice(talker, spoken):
    drive = driver(talker, num_blocks=9, max_tokens_per_step=16)
    for index, prompt in enumerate(PROMPTS):
        key = start(drive, index)
        drive.engine.feed(key, "up", {"prompt": Prompt(prompt), "rows": ROWS[index], "tail": TAIL}, final=True)
    drive.run()
    assert drive.engine.stats()["preemptions_total"] > 0
    check(drive, spoken)


@pytest.mark.parametrize("done", [1, 7, TOKENS])
@pytest.mark.parametrize("late", [False, True])
def test_resumed(talker, spoken, done, late):
    """Rows and tokens come again from the beginning; the tokens are known before their rows."""
    drive = driver(talker, max_tokens_per_step=16)
    for index, prompt in enumerate(PROMPTS):
        key = start(drive, index, resume=spoken[index][0][:done])
        drive.engine.feed(key, "up", {"prompt": Prompt(prompt)}, final=False)
        if late:
            drive.step()
        drive.engine.feed(key, "up", {"rows": ROWS[index][:2]}, final=False)
        if late:
            drive.step()
        drive.engine.feed(key, "up", {"rows": ROWS[index][2:], "tail": TAIL}, final=True)
    drive.run()
    check(drive, spoken)


def test_rows_are_for_those_who_want_them(talker):
    drive = driver(talker)
    request = stage_request("quiet", sampling=GREEDY)
    drive.add(request, Prompt(PROMPTS[0]), rows=ROWS[0], tail=TAIL)
    assert all(output.captured is None for output in drive.run()["quiet"].outputs)


def test_generated_tokens_of_a_conditioned_stage_are_not_shared(talker):
    """What a token is depends on its row: two requests with the same tokens and other rows must not meet."""
    drive = driver(talker)
    key = start(drive, 0)
    drive.engine.feed(key, "up", {"prompt": Prompt(PROMPTS[0]), "rows": ROWS[0], "tail": TAIL}, final=True)
    drive.run()
    longer = PROMPTS[0] + drive.results[key].token_ids
    again = start(drive, 1)
    drive.engine.feed(again, "up", {"prompt": Prompt(longer), "tail": TAIL}, final=True)
    drive.run()
    assert drive.results[again].outputs[0].cached_tokens == 0


def test_a_prompt_of_embeddings_is_shared_by_identity():
    adapter = TinyAdapter(tiny_model("qwen2", seed=4))
    ids = PROMPTS[2]
    base = adapter.embed(torch.tensor(ids), None).detach()
    drive = driver(adapter)

    def answer(key: str, embeds: torch.Tensor, identity) -> tuple[list[int], int]:
        drive.add(stage_request(key, sampling=GREEDY), Prompt(ids, embeds=embeds, identity=identity))
        result = drive.run()[key]
        return result.token_ids, result.outputs[0].cached_tokens

    cat, dog = base.clone(), base.clone()
    cat[4:9] = 1.0
    dog[4:9] = -1.0

    def named(name: bytes) -> list[int | bytes]:
        return [*ids[:4], *[name] * 5, *ids[9:]]

    first, cached = answer("cat", cat, named(b"cat"))
    assert cached == 0
    assert answer("dog", dog, named(b"dog")) != (first, 32)
    assert answer("cat again", cat, named(b"cat")) == (first, 32)
    assert answer("private", cat, []) == (first, 0)
    assert answer("private again", cat, []) == (first, 0)


@pytest.mark.parametrize("axes", [1, 3])
def test_positions_decide_what_is_shared(axes):
    """The same ids at other rotary positions are other keys: no hit, and the answer of a plain forward."""
    adapter = TinyAdapter(tiny_model("qwen2", seed=5))
    adapter.axes = axes
    ids = PROMPTS[2]
    stretched = torch.arange(len(ids))[None] * 2
    drive = driver(adapter, max_tokens_per_step=16)
    drive.add(stage_request("plain", sampling=GREEDY), Prompt(ids))
    drive.run()
    delta = len(ids) - 1
    drive.add(
        stage_request("wide", sampling=GREEDY), Prompt(ids, positions=stretched.expand(axes, -1), position_delta=delta)
    )
    result = drive.run()["wide"]
    assert result.outputs[0].cached_tokens == 0
    drive.add(
        stage_request("wide again", sampling=GREEDY),
        Prompt(ids, positions=stretched.expand(axes, -1), position_delta=delta),
    )
    again = drive.run()["wide again"]
    assert again.outputs[0].cached_tokens == 32
    adapter.model.set_attn_implementation("eager")
    tokens = list(ids)
    with torch.inference_mode():
        for place in range(TOKENS):
            after = torch.arange(place)[None] + len(ids) + delta
            where = torch.cat([stretched, after], dim=1)
            # one sequence, not several packed ones, which is what the library makes of gaps without a mask
            mask = torch.ones(1, len(tokens), dtype=torch.long)
            out = adapter.model(torch.tensor([tokens]), attention_mask=mask, position_ids=where)
            tokens.append(int(out.logits[0, -1].argmax()))
    assert result.token_ids == again.token_ids == tokens[len(ids) :]


class SilentAdapter(ConditionedAdapter):
    """Has nothing to say of a stream that ends without rows."""

    def feed(self, state, upstream, payload, *, final):
        return Fed(nothing=True) if final and not payload else super().feed(state, upstream, payload, final=final)


def test_a_stream_that_leaves_nothing_to_generate_ends_its_request_alone(talker, spoken):
    drive = driver(SilentAdapter(talker.model, capture=True))
    other = start(drive, 1)
    drive.engine.feed(other, "up", {"prompt": Prompt(PROMPTS[1]), "rows": ROWS[1], "tail": TAIL}, final=True)
    silent = start(drive, 0)
    drive.engine.feed(silent, "up", {}, final=True)
    drive.step()
    [end] = drive.results[silent].outputs
    assert (end.finished, end.finish_reason, end.error) == (True, "stop", None)
    assert (end.token_ids, end.text, end.captured) == ([], "", None)
    drive.run()
    check(drive, spoken, [1])
    assert drive.engine.stats()["waiting"] == drive.engine.stats()["running"] == 0
    assert start(drive, 0) == silent  # its id is free again


def test_an_end_is_not_reported_after_cancel(talker):
    drive = driver(SilentAdapter(talker.model, capture=True))
    silent = start(drive, 0)
    drive.engine.feed(silent, "up", {}, final=True)
    assert drive.engine.has_work()
    drive.engine.cancel(silent)
    assert not drive.engine.has_work()
    assert drive.engine.step() == []


def test_a_chunk_of_rows_waits_until_the_last_of_them_is_used(talker):
    """What waits counts against the edge's budget: rows far ahead of the codes do, the prompt does not."""
    drive = driver(talker)
    engine, key = drive.engine, start(drive, 3)
    engine.feed(key, "up", {"prompt": Prompt(PROMPTS[3])}, final=False)
    assert engine.backlog(key) == 0
    for at in range(0, 9, 3):
        engine.feed(key, "up", {"rows": ROWS[3][at : at + 3]}, final=False)
    assert engine.backlog(key) == 3
    waiting = []
    while engine.has_work():
        drive.step()
        waiting.append((len(drive.results[key].token_ids), engine.backlog(key)))
    assert waiting == [(n, 3 - n // 3) for n in range(1, 11)]
    engine.cancel(key)
    assert engine.backlog(key) == 0
