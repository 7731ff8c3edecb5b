"""The engine over the Triton kernels, decode steps recorded: by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from ar_adapter import Driver, TinyAdapter, generate, prompts, stage_request, tiny_model

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.sample import sampler
from segue.engines.autoregressive.sample.sampler import RowSampler, filtered
from segue.engines.autoregressive.step.decode_graphs import batch_sizes
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams

triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
PROMPTS = prompts(3, (3, 17, 9))
TOKENS = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def adapter() -> TinyAdapter:
    return TinyAdapter(tiny_model("qwen2", num_hidden_layers=2, max_position_embeddings=128))


@pytest.fixture(scope="module")
def expected(adapter: TinyAdapter) -> list[list[int]]:
    return [generate(adapter.model, prompt, TOKENS) for prompt in PROMPTS]


def serve(engine: AutoregressiveEngine) -> list[list[int]]:
    drive = Driver(engine)
    for index, prompt in enumerate(PROMPTS):
        drive.add(stage_request(f"r{index}", sampling=GREEDY), prompt)
    results = drive.run()
    return [results[f"r{index}"].token_ids for index in range(len(PROMPTS))]


@triton
@pytest.mark.parametrize("enforce_eager", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_parity(adapter: TinyAdapter, expected: list[list[int]], enforce_eager: bool) -> None:
    """Batches of three in recordings of four, chunks among them."""
    config = AutoregressiveConfig(
        num_blocks=16,
        block_size=8,
        max_batch=4,
        max_tokens_per_step=12,
        attention="triton",
        enforce_eager=enforce_eager,
    )
    engine = AutoregressiveEngine(adapter, config)
    before = len(adapter.forwards)
    assert serve(engine) == expected
    ran = adapter.forwards[before:]
    # a recording of four stands for steps of three; only the interpreter runs the function again
    assert (4 in ran) is not enforce_eager
    engine.audit()


@pytest.mark.nightly  # test_parity pads rows, too
@triton
def test_what_was_left_by_others_is_not_touched(adapter: TinyAdapter, expected: list[list[int]]) -> None:
    """Rows of padding write to a block of nobody, after steps of more sequences too."""
    config = AutoregressiveConfig(num_blocks=12, block_size=8, max_batch=4, attention="triton")
    engine = AutoregressiveEngine(adapter, config)
    assert serve(engine) == expected
    assert serve(engine) == expected  # with prefix hits


def test_sizes() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(16) == [1, 2, 4, 8, 16]
    assert batch_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]


@pytest.mark.parametrize("name", ["flashinfer", "flash_attn"])
def test_a_backend_that_is_not_there_is_named(adapter: TinyAdapter, name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(ConfigError, match=f"the package {name} is not installed"):
        AutoregressiveEngine(adapter, AutoregressiveConfig(num_blocks=8, attention=name))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention is 'cuda'; it must be one of auto, torch"):
        AutoregressiveConfig(num_blocks=8, attention="cuda")


@triton
def test_top_p_of_a_request_ignores_the_top_k_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """At limits that fall on a token's very border, where top-k and the kernel round differently."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(sampler, "_has_kernel", lambda device: True)
    scores = torch.randn(13, 32, generator=torch.Generator().manual_seed(0)).to(device) * 3
    best = scores[:12].topk(20).values
    borders = (best - best.logsumexp(-1, keepdim=True)).exp().cumsum(-1)[:, 3].tolist()

    def row(top_k: int, top_p: float) -> RowSampler:
        return RowSampler.of(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p), 0, (), 32, ())

    few = [row(20, border) for border in borders]
    mixed = filtered(scores, [*few, row(0, 0.5)])
    assert torch.equal(mixed[:12], filtered(scores[:12], few))
    assert torch.equal(mixed[12:], filtered(scores[12:], [row(0, 0.5)]))
