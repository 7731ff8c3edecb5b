"""The engine over the Triton kernels, decode steps recorded: by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util

import pytest
from ar_adapter import Driver, TinyAdapter, generate, prompts, stage_request, tiny_model

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.decode_graphs import batch_sizes
from segue.engines.autoregressive.engine import AutoregressiveEngine
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
@pytest.mark.parametrize("enforce_eager", [False, True])
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
