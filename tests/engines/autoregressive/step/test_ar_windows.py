"""Sliding-window and hybrid decoders: exact, however they are served, and no block is kept behind a window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ar_adapter import Driver, generate, prompts, stage_request
from ar_windowed import KINDS, Windowed, tiny

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.speculation.cache import keeping
from segue.kernels.attention.interface import Chunked
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from selection import daily

SIZE = 8
PROMPTS = prompts(6, (3, 17, 32, 9, 50, 70), seed=3)
ALL = range(len(PROMPTS))
TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)


@pytest.fixture(scope="module", params=daily(KINDS, ("mistral", "gemma 3", "llama 4", "gpt-oss")))
def adapter(request):
    return Windowed(tiny(request.param))


@pytest.fixture(scope="module")
def expected(adapter):
    answers = [generate(adapter.model, prompt, TOKENS) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) == len(answers), "the weights must make inputs matter"
    assert all(len(set(answer)) > 4 for answer in answers)
    return answers


def driver(adapter, **config) -> Driver:
    sizes = {"num_blocks": 320, "block_size": SIZE, **config}
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**sizes)))


def serve(drive: Driver, which=ALL) -> list[list[int]]:
    for index in which:
        drive.add(stage_request(f"r{index}", sampling=GREEDY), PROMPTS[index])
    results = drive.run()
    assert drive.engine.stats()["blocks_used"] == 0
    return [results[f"r{index}"].token_ids for index in which]


def test_alone(adapter, expected):
    drive = driver(adapter)
    for index, answer in enumerate(expected):
        assert serve(drive, which=[index]) == [answer]


def test_batched(adapter, expected):
    assert serve(driver(adapter)) == expected


@pytest.mark.parametrize("chunk", [5, 8, 21])
def test_chunked_prefill(adapter, expected, chunk):
    assert serve(driver(adapter, max_tokens_per_step=chunk)) == expected


def test_after_a_prefix_hit(adapter, expected):
    drive = driver(adapter)
    serve(drive)
    drive.results.clear()
    assert serve(drive) == expected
    hits = sum((len(prompt) - 1) // SIZE * SIZE for prompt in PROMPTS)
    assert drive.engine.stats()["prefix_hit_tokens_total"] == hits


def test_after_a_hit_in_the_middle_of_a_prompt(adapter):
    """The shared part was computed in one chunk with what follows it in the first prompt."""
    drive = driver(adapter)
    serve(drive, which=[5])
    drive.results.clear()
    fork = PROMPTS[5][:43] + PROMPTS[2]
    drive.add(stage_request("fork", sampling=GREEDY), fork)
    result = drive.run()["fork"]
    assert result.outputs[0].cached_tokens == 40
    assert result.token_ids == generate(adapter.model, fork, TOKENS)


def test_when_old_blocks_were_evicted(adapter, expected):
    """A prefix whose blocks are partly gone is computed again, from where it is whole."""
    drive = driver(adapter, num_blocks=driver(adapter).engine.resources.scheduler.limits.need(110))
    for index in (5, 4, 5, 2, 5, 4):
        drive.results.clear()
        assert serve(drive, which=[index]) == [expected[index]]


@pytest.mark.parametrize("caching", [True, False])
def test_after_preemption(adapter, expected, caching):
    """Some are held back in the middle of their output and lose their blocks to those that wait."""
    limits = driver(adapter).engine.resources.scheduler.limits
    sizes = {"num_blocks": limits.need(94) + len(limits.windows), "prefix_caching": caching, "max_tokens_per_step": 16}
    drive = driver(adapter, **sizes)
    for index in ALL:
        drive.add(stage_request(f"r{index}", sampling=GREEDY), PROMPTS[index])
    while len(drive.results) < 2:
        drive.step()
    for key in ("r0", "r1", "r2"):
        drive.engine.pause(key)
    drive.run()
    for key in ("r0", "r1", "r2"):
        drive.engine.resume(key)
    drive.run()
    assert [drive.results[f"r{index}"].token_ids for index in ALL] == expected
    assert drive.engine.stats()["preemptions_total"] > 0


def test_blocks_stay_bounded_over_a_long_output(adapter):
    """What a windowed group holds does not grow; a full group holds everything."""
    drive = driver(adapter)
    limits = drive.engine.resources.scheduler.limits
    long = SamplingParams(temperature=0.0, max_tokens=180)
    drive.add(stage_request("long", sampling=long), PROMPTS[2])
    most = [0] * len(limits.windows)
    while drive.engine.has_work():
        drive.step()
        for scheduled in drive.engine.resources.scheduler.running:
            most = [max(known, len(table.blocks)) for known, table in zip(most, scheduled.tables, strict=True)]
    whole = limits.blocks(32 + 180 - 1)
    for window, held in zip(limits.windows, most, strict=True):
        if window is None:
            assert held == whole
        elif isinstance(window, Chunked):
            assert held == window.size // SIZE < whole
        else:
            assert held <= limits.blocks(window - 1) + 1 < whole
    assert drive.results["long"].token_ids == generate(adapter.model, PROMPTS[2], 180)


def test_a_sequence_longer_than_the_pool():
    """A decoder with windows only needs room for its window, not for its sequence."""
    adapter = Windowed(tiny("mistral"))
    drive = driver(adapter, num_blocks=4, max_tokens_per_step=64)
    assert serve(drive, which=[5]) == [generate(adapter.model, PROMPTS[5], TOKENS)]
    stats = drive.engine.stats()
    assert (stats["blocks"], stats["preemptions_total"]) == (4, 0)


def test_a_smaller_window_changes_the_answer():
    answers = [[generate(tiny("gemma 2", sliding_window=window), PROMPTS[4], TOKENS)] for window in (9, 8)]
    assert answers[0] != answers[1]
    assert serve(driver(Windowed(tiny("gemma 2"))), which=[4]) == answers[0]


def test_a_spec_that_keeps_too_little_is_refused():
    adapter = Windowed(tiny("gemma 2"))
    adapter.kv.windows = (9, 9, 9)
    with pytest.raises(ConfigError, match="layer 1 has a window of 9, but the layer itself asks for no window"):
        driver(adapter)
    adapter.kv.windows = (8, None, 8)
    with pytest.raises(ConfigError, match="layer 0 has a window of 8, but the layer itself asks for a window of 9"):
        driver(adapter)
    adapter.kv.windows = (9, None)
    with pytest.raises(ConfigError, match="2 windows for 3 layers"):
        driver(adapter)


def test_chunks_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ConfigError, match="block_size is 16, but layers of this model attend in chunks of 24"):
        driver(Windowed(tiny("llama 4", attention_chunk_size=24)), block_size=16)


def test_what_does_not_know_of_chunks_is_refused():
    with pytest.raises(ConfigError, match="deterministic: layers of this model attend in chunks"):
        driver(Windowed(tiny("llama 4")), deterministic=True)
    with pytest.raises(ConfigError, match="cannot draft"):
        keeping(Windowed(tiny("llama 4")).kv)
    kv = Windowed(tiny("llama 4", no_rope_layers=[1, 1, 1, 1])).kv
    with pytest.raises(ConfigError, match="with chunked attention that captures rows needs a full-attention layer"):
        replace(kv, capture_width=8).layout(500)


def test_captured_rows_of_a_windowed_decoder_are_all_there_after_a_hit():
    """Rows live with blocks, and whole prompts' rows are wanted: such a decoder keeps everything."""
    drive = driver(Windowed(tiny("mistral"), capture=True))
    rows = []
    for key in ("first", "second"):
        request = stage_request(key, sampling=GREEDY, downstreams=frozenset({"next"}))
        drive.add(request, PROMPTS[5])
        rows.append(drive.run()[key].rows())
    assert drive.results["second"].outputs[0].cached_tokens == 64
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)
