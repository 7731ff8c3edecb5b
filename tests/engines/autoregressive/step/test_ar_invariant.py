"""Deterministic engines: the same logits to the bit, alone and in any company."""

from __future__ import annotations

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, generate, prompts, stage_request, tiny_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.kernels.attention.interface import AttentionOptions
from segue.kernels.attention.invariant_attention import invariant_attention, invariant_step
from segue.kernels.attention.paged_attention import ReferenceAttention
from segue.kernels.attention.paged_step import Part, paged_step
from segue.kernels.kv.layout import uniform
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("two_threads")
PROMPTS = prompts(6, (3, 17, 32, 9, 50, 21))
TOKENS = 9
TEXT = frozenset({"text"})
SAMPLING = SamplingParams(temperature=0.8, max_tokens=TOKENS, logprobs=-1)
Told = list[list[tuple[int, float]]]


@pytest.fixture(scope="module")
def adapter():
    # 90 and 44 are no multiples of a vector's width: rows end in the scalar part of kernels
    shape = {"intermediate_size": 90, "hidden_size": 44, "num_attention_heads": 2, "num_key_value_heads": 1}
    return TinyAdapter(tiny_model("qwen3", **shape, head_dim=22))


def driver(adapter, **config) -> Driver:
    config = {"num_blocks": 64, "block_size": 8, "max_logprobs": -1, "deterministic": True, **config}
    return Driver(AutoregressiveEngine(adapter, AutoregressiveConfig(**config)))


def told(result) -> Told:
    """Per token, the whole distribution as it came: (token, log-probability), bit by bit."""
    return [[(top.token_id, top.logprob) for top in one.top] for output in result.outputs for one in output.logprobs]


def serve(drive: Driver, which, **fields) -> dict[int, Told]:
    for index in which:
        request = stage_request(f"r{index}", sampling=SAMPLING, to_client=TEXT, seed=index, **fields)
        drive.add(request, PROMPTS[index])
    results = drive.run()
    return {index: told(results[f"r{index}"]) for index in which}


@pytest.fixture(scope="module")
def alone(adapter) -> dict[int, Told]:
    found: dict[int, Told] = {}
    for index in range(len(PROMPTS)):
        found |= serve(driver(adapter), [index])
    assert all(len(one) == TOKENS for one in found.values())
    return found


@pytest.mark.parametrize("which", [(0, 1), (5, 3, 1), (4, 2, 0, 1, 3, 5)])
def test_in_batches(adapter, alone, which):
    assert serve(driver(adapter), which) == {index: alone[index] for index in which}


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.nightly), 7, 16, 40])
def test_in_chunks_beside_others(adapter, alone, tokens):
    assert serve(driver(adapter, max_tokens_per_step=tokens), range(6)) == alone


def test_joining_while_others_run(adapter, alone):
    drive = driver(adapter, max_tokens_per_step=20)
    for index in range(6):
        drive.add(stage_request(f"r{index}", sampling=SAMPLING, to_client=TEXT, seed=index), PROMPTS[index])
        for _ in range(3):
            drive.step()
    results = drive.run()
    assert {index: told(results[f"r{index}"]) for index in range(6)} == alone


@pytest.mark.parametrize("block_size", [8, 5])
def test_behind_a_cached_prefix(adapter, alone, block_size):
    drive = driver(adapter, block_size=block_size)
    serve(drive, range(6))
    drive.results.clear()
    assert serve(drive, range(6)) == alone
    assert drive.engine.stats()["prefix_hit_tokens_total"] > 100


def test_after_preemption(adapter, alone):
    drive = driver(adapter, num_blocks=11, prefix_caching=False)
    assert serve(drive, range(6)) == alone
    assert drive.engine.stats()["preemptions_total"] > 0


def test_after_a_resume(adapter, alone):
    drive = driver(adapter)
    drive.add(stage_request("whole", sampling=SAMPLING, to_client=TEXT, seed=4), PROMPTS[4])
    ids = drive.run()["whole"].token_ids
    drive = driver(adapter)
    drive.add(stage_request("again", sampling=SAMPLING, to_client=TEXT, seed=4, resume=ids[:4]), PROMPTS[4])
    again = drive.run()["again"]
    assert again.token_ids == ids
    assert told(again) == alone[4][3:]


def test_of_the_prompt(adapter):
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    found = []
    for tokens, others in ((2048, ()), (9, (1, 2, 3))):
        drive = driver(adapter, max_tokens_per_step=tokens)
        for index in others:
            drive.add(stage_request(f"r{index}", sampling=SAMPLING, to_client=TEXT), PROMPTS[index])
        drive.add(stage_request("it", sampling=sampling, to_client=TEXT), PROMPTS[4])
        [first] = [output for output in drive.run()["it"].outputs if output.prompt_logprobs]
        found.append(first.prompt_logprobs)
    assert found[0] == found[1]


def test_without_it_bits_differ(adapter, alone):
    """The comparison sees a bit: the plain engine's answers depend on the company."""
    plain: dict[int, Told] = {}
    for index in range(6):
        plain |= serve(driver(adapter, deterministic=False), [index])
    assert serve(driver(adapter, deterministic=False), range(6)) != plain


def test_the_answers_are_the_models(adapter):
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    drive = driver(adapter)
    for index, prompt in enumerate(PROMPTS):
        drive.add(stage_request(f"r{index}", sampling=greedy), prompt)
    results = drive.run()
    for index, prompt in enumerate(PROMPTS):
        assert results[f"r{index}"].token_ids == generate(adapter.model, prompt, TOKENS)


def test_captured_rows_are_the_same(adapter):
    capturing = TinyAdapter(adapter.model, capture=True)
    rows = []
    for which in ([4], [1, 4, 2]):
        drive = driver(capturing)
        for index in which:
            request = stage_request(
                f"r{index}", sampling=SAMPLING, to_client=TEXT, seed=4, downstreams=frozenset({"x"})
            )
            drive.add(request, PROMPTS[index])
        rows.append(drive.run()["r4"].rows())
    assert torch.equal(*rows)


def test_sliding_windows():
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1, layer_types=None)
    adapter = TinyAdapter(model)
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    drive = driver(adapter)
    drive.add(stage_request("it", sampling=greedy), PROMPTS[4])
    assert drive.run()["it"].token_ids == generate(model, PROMPTS[4], TOKENS)
    assert serve(driver(adapter), [4]) == {4: serve(driver(adapter), range(6))[4]}


def test_a_mixture_of_experts_is_refused():
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=48, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
        decoder_sparse_step=1, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    adapter = TinyAdapter(Qwen3MoeForCausalLM(config).eval())
    driver(adapter, deterministic=False)
    with pytest.raises(ConfigError, match=r"is not possible for this model.*experts") as caught:
        driver(adapter)
    assert caught.value.field == "deterministic"


@pytest.mark.parametrize(
    "form",
    [
        AttentionOptions(0.3),
        AttentionOptions(0.3, window=6),
        AttentionOptions(0.3, softcap=5.0),
        AttentionOptions(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.1])),
    ],
)
def test_attention_is_that_of_the_reference(form):
    generator = torch.Generator().manual_seed(1)
    parts = [Part((3, 0, 7), 0, 21), Part((1, 2, 5, 6), 16, 29)]
    device = torch.device("cpu")
    stores = [
        KVStore(uniform(1, 2, 8), num_blocks=8, block_size=8, dtype=torch.float32, device=device) for _ in range(2)
    ]
    before = torch.randn(16, 2, 8, generator=generator)
    for store in stores:
        store.write(0, torch.tensor([*range(8, 24)]), before, before * 0.5)
    q, k, v = (torch.randn(heads, 34, 8, generator=generator) for heads in (4, 2, 2))
    expected = ReferenceAttention().attend(0, q, k, v, paged_step(stores[0], parts), form)
    padded = [torch.nn.functional.pad(one, (0, 0, 0, 6), value=9.0) for one in (q, k, v)]
    found = invariant_attention(0, *padded, invariant_step(stores[1], parts), form)
    torch.testing.assert_close(found[:34], expected, rtol=1e-5, atol=1e-5)
    assert not found[34:].any()
    assert torch.equal(stores[0].keys[0], stores[1].keys[0])


def test_has_an_attention_of_its_own():
    with pytest.raises(ConfigError, match="leave it out") as caught:
        AutoregressiveConfig(num_blocks=1, deterministic=True, attention="flashinfer")
    assert caught.value.field == "attention"


def test_warms_up(adapter, alone):
    drive = driver(adapter)
    drive.engine.warm_up()
    assert serve(drive, [1, 5]) == {1: alone[1], 5: alone[5]}
