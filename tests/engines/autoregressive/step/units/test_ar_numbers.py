"""A stage model that yields rows of numbers gives those of a plain loop, whatever happens to its requests."""

from __future__ import annotations

import pytest
import torch
from ar_adapter import Driver, prompts, stage_request
from ar_numbers import STOP, NumberAdapter, plain_numbers
from ar_rows import codes, rows_driver

from segue.engines.autoregressive.contract import Draws, numbers_of
from segue.messages.errors import StageFailed
from segue.messages.sampling import SamplingParams

PROMPTS = prompts(4, (5, 16, 33, 24))
MOST = 40
WAYS = [SamplingParams(temperature=heat, max_tokens=MOST) for heat in (0.0, 0.8, 0.8, 0.3)]


@pytest.fixture(scope="module")
def adapter() -> NumberAdapter:
    return NumberAdapter(seed=0)


@pytest.fixture(scope="module")
def plain(adapter: NumberAdapter) -> list[torch.Tensor]:
    """The numbers of each prompt, request i with seed i."""
    found = [
        plain_numbers(adapter, prompt, MOST, way.temperature or 0.0, seed)
        for seed, (prompt, way) in enumerate(zip(PROMPTS, WAYS, strict=True))
    ]
    lengths = [len(numbers) for numbers in found]
    assert len(set(lengths)) > 2, lengths
    assert sum(1 < length < MOST for length in lengths) > 2, lengths
    return found


def start(drive: Driver, index: int, name: str = "", **fields: object) -> str:
    name = name or f"r{index}"
    drive.add(stage_request(name, seed=index, sampling=WAYS[index], **fields), PROMPTS[index])
    return name


def numbers(drive: Driver, name: str) -> torch.Tensor:
    return numbers_of(torch.tensor(codes(drive, name))[:, 1:])


WITHIN = 1e-3
"""Of numbers of order one: a row is the input of the next, so that rounding adds up."""


def same(drive: Driver, name: str, expected: torch.Tensor) -> None:
    torch.testing.assert_close(numbers(drive, name), expected, atol=WITHIN, rtol=0)


@pytest.fixture(scope="module")
def alone(adapter: NumberAdapter, plain: list[torch.Tensor]) -> list[list[list[int]]]:
    """The rows of each request, alone in its engine."""
    found = []
    for index, expected in enumerate(plain):
        drive = rows_driver(adapter)
        name = start(drive, index)
        drive.run()
        same(drive, name, expected)
        assert (drive.results[name].last.finish_reason == "stop") == (codes(drive, name)[-1][0] == STOP)
        found.append(codes(drive, name))
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "config",
    [{}, {"max_tokens_per_step": 7, "prefill_chunk": 5}, {"num_blocks": 9}],
    ids=["together", "chunks", "preempted"],
)
def test_together(adapter, plain, alone, config, ahead):
    drive = rows_driver(adapter, ahead=ahead, **config)
    for _ in range(2):  # the second time after prefix hits
        drive.results.clear()
        names = [start(drive, index) for index in range(4)]
        drive.run()
        for name, expected in zip(names, plain, strict=True):
            same(drive, name, expected)
    assert (drive.engine.stats()["preemptions_total"] > 0) == ("num_blocks" in config)


def test_preempted_after_every_row(adapter, plain, alone):
    """What was emitted stays; the rows before it are computed again from their numbers."""
    drive = rows_driver(adapter, num_blocks=10, prefix_caching=False)
    for when in range(1, len(plain[1])):
        drive.results.clear()
        name = start(drive, 1)
        while name not in drive.results or len(drive.results[name].token_ids) < when:
            drive.step()
        drive.engine.pause(name)
        long = stage_request("long", sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        drive.add(long, prompts(1, (75,))[0])
        while "long" not in drive.results:
            drive.step()
        drive.engine.resume(name)
        drive.run()
        assert drive.engine.stats()["preemptions_total"] == when
        same(drive, name, plain[1])


@pytest.mark.parametrize("ahead", [False, True])
def test_resumed_after_every_row(adapter, plain, alone, ahead):
    """A journalled row is emitted again in every bit, and the rest is what it would have been."""
    drive = rows_driver(adapter, ahead=ahead, num_blocks=400)
    for known in range(len(alone[2]) + 1):
        start(drive, 2, f"after {known}", resume=[list(row) for row in alone[2][:known]])
    drive.run()
    for known in range(len(alone[2]) + 1):
        assert codes(drive, f"after {known}")[:known] == alone[2][:known]
        same(drive, f"after {known}", plain[2])


def test_a_journalled_row_is_taken_as_it_is(adapter, plain, alone):
    """Signs included, and even if this attempt would draw another one."""
    changed = [list(row) for row in alone[1][:4]]
    changed[3][1] = int(torch.tensor(float(plain[1][3, 0]) - 2.0).view(torch.int32))
    drive = rows_driver(adapter)
    name = start(drive, 1, resume=changed)
    drive.run()
    assert codes(drive, name)[:4] == changed
    assert float((numbers(drive, name)[4] - plain[1][4]).abs().max()) > 10 * WITHIN


def test_nan_fails_alone(adapter):
    drive = rows_driver(adapter)
    adapter.poisoned = True
    try:
        name = start(drive, 1)
        drive.run()
    finally:
        adapter.poisoned = False
    assert isinstance(drive.results[name].last.error, StageFailed)


def test_noise_is_gaussian_with_the_temperature_as_its_variance():
    uniform = torch.rand(20_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    heat = torch.tensor([0.0, 0.5, 2.0, 1.0], dtype=torch.float64).repeat(5_000)
    filters = heat[:, None] * torch.tensor([1.0, 0.0, 0.0])
    noise = Draws(uniform, heat == 0, filters).noise()
    for own in heat.unique():
        part = noise[heat == own]
        assert abs(float(part.mean())) < 0.03
        assert abs(float(part.var()) - float(own)) < 0.05 * float(own) + 1e-12
    assert torch.isfinite(Draws(torch.zeros(1, 4, dtype=torch.float64), heat[:1] == 0, filters[1:2]).noise()).all()


def test_bits_survive():
    numbers = torch.tensor([[0.0, -0.0, 1e-45, -1.5, 3.4e38, 0.1]])
    draws = Draws(torch.empty(1, 6), torch.tensor([False]), torch.ones(1, 3))
    again = numbers_of(torch.tensor(draws.codes_of(numbers).tolist()))
    assert again.view(torch.int32).equal(numbers.view(torch.int32))
