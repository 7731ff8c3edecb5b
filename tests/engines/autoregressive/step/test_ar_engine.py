"""How requests enter, end, fail and leave: one request's trouble is its own."""

from __future__ import annotations

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, generate, prompts, stage_request, tiny_model

from segue.engines.autoregressive.cache.memory import blocks_for, bytes_per_block
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Fed, KVSpec, Prompt
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed
from segue.messages.sampling import SamplingParams

PROMPTS = prompts(4, (5, 16, 33, 24))
TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
TEXT = frozenset({"text"})


@pytest.fixture
def adapter():
    return TinyAdapter(tiny_model("qwen2", seed=7))


@pytest.fixture
def answers(adapter):
    return [generate(adapter.model, prompt, TOKENS) for prompt in PROMPTS]


def driver(adapter, **config) -> Driver:
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**{"num_blocks": 64, "block_size": 8, **config})))


def one(adapter, sampling: SamplingParams, prompt=PROMPTS[0], **fields):
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=sampling, to_client=TEXT, **fields), prompt)
    return drive.run()["it"]


def letters(tokens) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


# --- how an output ends ----------------------------------------------------------------------------------------------


def test_end_token_of_the_family(adapter, answers):
    end = answers[0][5]
    place = answers[0].index(end)
    adapter.end_token_ids = frozenset({end})
    result = one(adapter, GREEDY)
    assert result.token_ids == answers[0][: place + 1]
    assert result.text == letters(answers[0][:place])
    assert (result.last.finished, result.last.finish_reason) == (True, "stop")
    ignoring = one(adapter, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    assert ignoring.token_ids == answers[0]
    assert ignoring.last.finish_reason == "length"


def test_stop_token_of_the_request(adapter, answers):
    stop = SamplingParams(temperature=0.0, max_tokens=TOKENS, stop_token_ids=[answers[0][3]], ignore_eos=True)
    place = answers[0].index(answers[0][3])
    assert one(adapter, stop).token_ids == answers[0][: place + 1]


def test_min_tokens_forbids_the_end(adapter, answers):
    adapter.end_token_ids = frozenset({answers[0][0]})
    result = one(adapter, SamplingParams(temperature=0.0, max_tokens=TOKENS, min_tokens=4))
    assert len(result.token_ids) >= 4
    assert answers[0][0] not in result.token_ids[:4]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(adapter, answers, include):
    text = letters(answers[0])
    stop = text[4:7]
    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, stop=["never", stop], include_stop_str_in_output=include
    )
    end = text.index(stop) + 3
    result = one(adapter, params)
    assert result.text == text[: end if include else end - 3]
    assert result.token_ids == answers[0][:end]
    assert result.last.finish_reason == "stop"


def test_text_held_for_a_stop_string_comes_at_the_end(adapter, answers):
    text = letters(answers[0])
    result = one(adapter, SamplingParams(temperature=0.0, max_tokens=TOKENS, stop=[text[-2:] + "!"]))
    assert result.text == text
    assert result.last.finish_reason == "length"


def test_context_is_full(adapter, answers):
    adapter.max_model_len = len(PROMPTS[2]) + 8
    result = one(adapter, SamplingParams(temperature=0.0), PROMPTS[2])
    assert result.token_ids == answers[2][:8]
    assert result.last.finish_reason == "length"


def test_pool_is_the_context_of_a_lone_request(adapter, answers):
    drive = driver(adapter, num_blocks=5)
    drive.add(stage_request("it", sampling=SamplingParams(temperature=0.0)), PROMPTS[2])
    result = drive.run()["it"]
    assert result.token_ids == answers[2][: 40 - 33]
    assert result.last.finish_reason == "length"


def test_first_output_tells_the_counts(adapter):
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=GREEDY), Prompt(PROMPTS[1], modality_tokens={"text": 12, "audio": 4}))
    first, *others = drive.run()["it"].outputs
    assert (first.prompt_tokens, first.cached_tokens, first.modality_tokens) == (16, 0, {"text": 12, "audio": 4})
    assert all(output.prompt_tokens == 0 and output.modality_tokens == {} for output in others)


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_seeded_draws_are_the_same_alone_in_a_batch_preempted_and_resumed(adapter):
    sampling = SamplingParams(temperature=1.0, top_k=30, top_p=0.95, repetition_penalty=1.1, max_tokens=TOKENS)

    def served(resume=None, **config):
        drive = driver(adapter, **config)
        for index, prompt in enumerate(PROMPTS):
            known = resume[index][:6] if resume else []
            drive.add(stage_request(f"r{index}", sampling=sampling, seed=100 + index, resume=known), prompt)
        results = drive.run()
        return [results[f"r{index}"].token_ids for index in range(4)], drive.engine.stats()["preemptions_total"]

    batched, _ = served()
    one_by_one, _ = served(max_batch=1)
    preempted, count = served(num_blocks=10)
    assert count > 0
    assert batched == one_by_one == preempted == served(resume=batched)[0]
    assert batched != [generate(adapter.model, prompt, TOKENS) for prompt in PROMPTS]


# --- bad input and failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "message"), [([1] * 65, "65 tokens.*64"), ([], "empty")])
def test_a_prompt_that_can_never_run(adapter, answers, prompt, message):
    drive = driver(adapter, num_blocks=8)
    drive.add(stage_request("good", sampling=GREEDY), PROMPTS[0])
    drive.add(stage_request("bad", sampling=GREEDY), prompt)
    results = drive.run()
    error = results["bad"].last.error
    assert isinstance(error, InvalidRequest)
    assert error.field == "messages"
    with pytest.raises(InvalidRequest, match=message):
        raise error
    assert results["good"].token_ids == answers[0]


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt([1, 2, 3], embeds=torch.zeros(2, 48)),
        Prompt([1, 2, 3], positions=torch.zeros(3, 3, dtype=torch.long)),
        Prompt([1, 2, 3], identity=[1]),
    ],
)
def test_a_prompt_that_contradicts_itself(adapter, prompt):
    drive = driver(adapter)
    drive.add(stage_request("bad"), prompt)
    assert isinstance(drive.run()["bad"].last.error, StageFailed)


def test_an_adapter_that_refuses_a_chunk(adapter, answers):
    def refuse(state, upstream, payload, *, final) -> Fed:
        if upstream == "wrong":
            raise InvalidRequest("no such voice", field="voice")
        return Fed(payload["prompt"])

    adapter.feed = refuse
    drive = driver(adapter)
    drive.add(stage_request("good", sampling=GREEDY), PROMPTS[0])
    drive.engine.add(stage_request("bad"))
    drive.engine.feed("bad", "wrong", {}, final=True)
    results = drive.run()
    assert results["bad"].last.error.field == "voice"
    assert results["good"].token_ids == answers[0]


def test_a_failed_forward_fails_only_the_requests_in_it(adapter, answers):
    drive = driver(adapter, max_batch=2)
    for index in range(4):
        drive.add(stage_request(f"r{index}", sampling=GREEDY), PROMPTS[index])
    drive.step()
    drive.engine.pause("r0")
    drive.step()
    adapter.fail_next = True
    drive.step()
    failed = {key for key, result in drive.results.items() if result.last.error}
    assert len(failed) == 2
    assert "r0" not in failed
    for key in failed:
        assert isinstance(drive.results[key].last.error, StageFailed)
        assert "the device is on fire" in str(drive.results[key].last.error)
    drive.engine.resume("r0")
    drive.run()
    for index in range(4):
        if f"r{index}" not in failed:
            assert drive.results[f"r{index}"].token_ids == answers[index]
    assert drive.engine.stats()["blocks_used"] == 0


def test_nan_fails_only_its_own_request_and_leaves_no_trace(adapter, answers):
    poison = 96
    assert not any(poison in [*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True))
    adapter_engine = driver(adapter, num_blocks=16, max_tokens_per_step=24)
    adapter.poison = poison
    for turn in range(2):
        adapter_engine.results.clear()
        for index in range(4):
            adapter_engine.add(stage_request(f"r{index}", sampling=GREEDY), PROMPTS[index])
        adapter_engine.add(stage_request("bad", sampling=GREEDY), [*PROMPTS[3], *[poison] * 8, 5])
        results = adapter_engine.run()
        assert isinstance(results["bad"].last.error, StageFailed), turn
        assert "NaN" in str(results["bad"].last.error)
        assert [results[f"r{index}"].token_ids for index in range(4)] == answers


def test_nan_of_an_early_chunk_is_not_shared(adapter):
    """The chunk makes no logits, so only its hidden states show it; the model recovers, the cache must not remember."""
    prompt = [96, *PROMPTS[2]]
    drive = driver(adapter, max_tokens_per_step=16)
    adapter.poison = 96
    drive.add(stage_request("bad", sampling=GREEDY), prompt)
    assert isinstance(drive.run()["bad"].last.error, StageFailed)
    adapter.poison = None
    drive.add(stage_request("good", sampling=GREEDY), prompt)
    assert drive.run()["good"].token_ids == generate(adapter.model, prompt, TOKENS)


def test_stop_strings_on_a_stage_without_text(adapter):
    def no_text(token_ids, *, skip_special_tokens):
        raise StageFailed("codes are not text")

    adapter.decode_text = no_text
    drive = driver(adapter)
    with pytest.raises(InvalidRequest, match=r"sampling\.main\.stop is set, but stage 'main' makes no text"):
        drive.engine.add(stage_request("it", sampling=SamplingParams(stop=["x"])))
    drive.engine.audit()
    drive.engine.add(stage_request("fine", sampling=GREEDY))


def test_the_same_id_twice(adapter):
    drive = driver(adapter)
    drive.engine.add(stage_request("it"))
    with pytest.raises(InvalidRequest, match="'it' is running"):
        drive.engine.add(stage_request("it"))


def test_cancelling_at_every_moment_frees_everything(adapter):
    for moment in range(6):
        drive = driver(adapter, max_tokens_per_step=8)
        drive.add(stage_request("it", sampling=GREEDY), PROMPTS[2])
        for _ in range(moment):
            drive.step()
        drive.engine.cancel("it")
        drive.engine.audit()
        assert not drive.engine.has_work()
        stats = drive.engine.stats()
        assert (stats["blocks_used"], stats["running"], stats["waiting"]) == (0, 0, 0)


def test_paused_requests_give_way_and_come_back(adapter, answers):
    """All blocks are held by paused requests; another one still runs."""
    drive = driver(adapter, num_blocks=8, max_batch=2)
    for index in (1, 3):
        drive.add(stage_request(f"r{index}", sampling=GREEDY), PROMPTS[index])
    drive.step()
    for index in (1, 3):
        drive.engine.pause(f"r{index}")
    assert not drive.engine.has_work()
    drive.add(stage_request("r2", sampling=GREEDY), PROMPTS[2])
    drive.run()
    assert drive.results["r2"].token_ids == answers[2]
    for index in (1, 3):
        drive.engine.resume(f"r{index}")
    drive.run()
    assert [drive.results[f"r{index}"].token_ids for index in (1, 3)] == [answers[1], answers[3]]


def test_stats(adapter):
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=GREEDY), PROMPTS[2])
    drive.engine.add(stage_request("without input"))
    drive.step()
    stats = drive.engine.stats()
    assert stats["running"] == stats["waiting"] == stats["batch"] == stats["generated_tokens_total"] == 1
    assert (stats["blocks_used"], stats["blocks"], stats["prefill_tokens_total"]) == (5, 64, 33)
    drive.run()
    assert drive.engine.stats()["generated_tokens_total"] == TOKENS


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_blocks_of_a_budget():
    spec = KVSpec(layers=2, kv_heads=2, head_dim=8, dtype=torch.bfloat16, capture_width=4)
    layout = spec.layout(256)
    assert bytes_per_block(spec, layout, 16) == 16 * (2 * 2 * 2 * 8 * 2 + 4 * 4)
    assert blocks_for(10_000, spec, layout, 16) == 10_000 // 2304
    assert blocks_for(10_000, spec, layout, 16, elsewhere=2304) == 10_000 // 4608
    with pytest.raises(ConfigError, match="2304 bytes"):
        blocks_for(2303, spec, layout, 16)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_batch", "max_tokens_per_step"])
def test_sizes_must_be_positive(name):
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        AutoregressiveConfig(**{"num_blocks": 4, name: 0})
