"""Calls of a network that are recorded: which, how many, and that they see the inputs of the day."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from segue.kernels.cpu.native import libraries
from segue.kernels.cpu.network_recorder import ARENA_BYTES, CpuRecorder
from segue.kernels.graphs.compiled import compile_forwards
from segue.kernels.graphs.cuda_capture import Outside
from segue.kernels.graphs.replay import (
    HELD_BYTES,
    MOST,
    USES,
    Call,
    CudaRecorder,
    NetworkGraphs,
    Recorded,
)
from segue.kernels.linear.linear import PackedLinear

CPU = torch.device("cpu")


class OnPaper:
    """Runs the function again over the same fixed tensors, and notes what was asked of it."""

    held_bytes = 0
    most = MOST

    def __init__(self, held: int = 0) -> None:
        self.recorded = 0
        self.replayed = 0
        self.bytes = held

    def held(self, run: Callable[[], Any]) -> tuple[Any, int]:
        return run(), self.bytes

    def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
        self.recorded += 1
        inputs = [tensor.clone() for tensor in given]
        [made] = call(inputs)
        own = made.clone()

        def again() -> None:
            self.replayed += 1
            own.copy_(call(inputs)[0])

        return Recorded(inputs, again, (own,)), (made,)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, *, shapes: list[tuple[int, int]], texts: list[torch.Tensor]) -> Any:
        self.calls += 1
        return (x * shapes[0][0] + sum(text.sum() for text in texts),)


def call(graphs: NetworkGraphs, number: float, rows: int = 2, height: int = 3) -> float:
    texts = [torch.full((4,), number), torch.full((2,), 1.0)]
    [made] = graphs(torch.full((rows, 5), number), shapes=[(height, 1)], texts=texts)
    assert made.shape == (rows, 5)
    expected = number * height + 4 * number + 2
    assert torch.all(made == expected)
    return float(made[0, 0])


def test_from_the_third_call_of_a_kind_on() -> None:
    paper = OnPaper()
    graphs = NetworkGraphs(Network().forward, CPU, paper)
    for number in range(6):
        call(graphs, float(number))
        assert paper.recorded == (number + 1 >= USES)
    assert paper.replayed == 3, "what it gave while it was recorded is taken"
    for _ in range(USES - 1):  # other rows, other values: other kinds
        call(graphs, 2.0, rows=3)
        call(graphs, 2.0, height=4)
    assert paper.recorded == 1
    call(graphs, 2.0, rows=3)
    call(graphs, 2.0, height=4)
    assert paper.recorded == 3


def test_what_was_given_out_is_not_written_to_again() -> None:
    graphs = NetworkGraphs(Network().forward, CPU, OnPaper())
    for _ in range(USES + 1):
        [kept] = graphs(torch.ones(1, 5), shapes=[(1, 1)], texts=[])
    graphs(torch.zeros(1, 5), shapes=[(1, 1)], texts=[])
    assert torch.all(kept == 1)


def test_large_calls_and_those_that_something_else_decides_are_not_recorded() -> None:
    paper = OnPaper(HELD_BYTES + 1)
    graphs = NetworkGraphs(Network().forward, CPU, paper)
    for number in range(5):
        call(graphs, float(number))
    assert paper.recorded == 0
    paper.bytes = 0
    with graphs.eager():
        for number in range(5):
            call(graphs, float(number), rows=1)
    assert paper.recorded == 0
    for _ in range(5):  # tensors of elsewhere
        graphs(torch.ones(1, 5, device="meta"), shapes=[(1, 1)], texts=[])
        graphs(torch.ones(1, 5), shapes=[(1, 1)], texts=[torch.ones(2), bytearray(b"ab")][:1])
    assert paper.recorded == 1


def test_what_can_change_is_no_value() -> None:
    paper = OnPaper()
    graphs = NetworkGraphs(lambda x, extra: (x + len(extra),), CPU, paper)
    for length in range(5):
        [made] = graphs(torch.zeros(1), bytearray(length))
        assert float(made) == length
    assert paper.recorded == 0


@dataclass(eq=False)
class Scale:
    """Equal to itself alone, whatever its value."""

    value: float


class Pair(NamedTuple):
    """Not a plain tuple."""

    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
@torch.inference_mode()
def test_what_is_not_seen_through_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """It is run as it is, as often as it comes, and says the same as ever."""
    recorder = CpuRecorder(libraries()[0])
    scaled = NetworkGraphs(lambda x, scale: (x * scale.value,), CPU, recorder)
    scale = Scale(0)
    for number in range(2 * USES):
        scale.value = number
        assert torch.equal(scaled(torch.ones(3), scale)[0], torch.full((3,), float(number)))

    swapped = NetworkGraphs(lambda pair: Pair(pair.second * 2, pair.first), CPU, recorder)
    for number in range(2 * USES):
        made = swapped(Pair(torch.full((3,), float(number)), torch.ones(3)))
        assert torch.equal(made.first, torch.full((3,), 2.0))
        assert torch.equal(made.second, torch.full((3,), float(number)))
    assert not caplog.text

    named = NetworkGraphs(lambda x: Pair(x * 2, x), CPU, recorder)
    for number in range(2 * USES):
        assert torch.equal(named(torch.full((3,), float(number))).first, torch.full((3,), 2.0 * number))
    assert "it returns Pair, which may contain anything" in caplog.text


@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
@torch.inference_mode()
def test_numbers_that_are_equal_and_of_other_types() -> None:
    graphs = NetworkGraphs(lambda x, by: (x * by,), CPU, CpuRecorder(libraries()[0]))
    for by in (2, 2.0) * USES:
        assert graphs(torch.arange(3), by)[0].dtype == (torch.arange(3) * by).dtype


@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
@torch.inference_mode()
def test_recordings_share_their_memory() -> None:
    recorder = CpuRecorder(libraries()[0])

    def call(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        doubled = given[0] * 2
        given[0].zero_()
        return [doubled, given[0], given[1]]

    recorded = []
    for rows in range(1, 9):
        given = [torch.randn(32, rows).T, torch.full((rows,), rows)]
        before = [tensor.clone() for tensor in given]
        one, made = recorder.record(call, given)
        expected = call([tensor.clone() for tensor in given])
        assert all(map(torch.equal, given, before)), "what is given is not written to"
        assert all(map(torch.equal, made, expected))
        recorded.append((one, given, made, expected))
    for one, given, made, expected in recorded:
        given[0] += 1
        assert all(map(torch.equal, one(given), call([tensor.clone() for tensor in given])))
        assert all(map(torch.equal, made, expected)), "what was given out is the caller's"
    memory = {tensor.untyped_storage().data_ptr() for one, *_ in recorded for tensor in (*one.inputs, *one.made)}
    assert len(memory) == 1


@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
@torch.inference_mode()
def test_more_than_the_memory_for_all_recordings() -> None:
    calls = []

    def forward(x: torch.Tensor) -> Any:
        calls.append(len(x))
        return (x.amax(), x)

    graphs = NetworkGraphs(forward, CPU, CpuRecorder(libraries()[0]))
    x = torch.ones(ARENA_BYTES // 4 + 1)
    for number in range(1, USES + 3):
        x[0] = number
        largest, same = graphs(x)
        assert float(largest) == number
        assert float(same[0]) == number
        assert len(calls) == number


@torch.inference_mode()
def test_a_call_that_fails_is_no_reason_to_record_none() -> None:
    def forward(x: torch.Tensor) -> Any:
        if len(x) > 3:
            raise RuntimeError("no positions for so many")
        return (x * 2,)

    paper = OnPaper()
    graphs = NetworkGraphs(forward, CPU, paper)
    for _ in range(2 * USES):
        with pytest.raises(RuntimeError, match="no positions"):
            graphs(torch.ones(4))
    for _ in range(USES):
        graphs(torch.ones(3))
    assert paper.recorded == USES + 2


def test_so_many_kinds_at_a_time() -> None:
    paper = OnPaper()
    graphs = NetworkGraphs(Network().forward, CPU, paper)
    for rows in range(1, MOST + 2):
        for _ in range(USES):
            call(graphs, 1.0, rows=rows)
    assert paper.recorded == MOST + 1
    call(graphs, 1.0, rows=2)
    assert paper.recorded == MOST + 1, "it is still there"
    for _ in range(USES):
        call(graphs, 1.0, rows=1)
    assert paper.recorded == MOST + 2, "the one not used for longest was not"


def test_a_network_that_cannot_be_recorded_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Never(OnPaper):
        def record(self, call: Call, given: Sequence[torch.Tensor]) -> tuple[Recorded, Any]:
            self.recorded += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    never, network = Never(), Network()
    graphs = NetworkGraphs(network.forward, CPU, never)
    for number in range(2 * USES):
        call(graphs, float(number))
    assert never.recorded == 1
    assert network.calls == 2 * USES
    assert "not permitted" in caplog.text


class Layers(nn.Module):
    """Two GEMMs; between them, the host may act on a value."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.first, self.second = (PackedLinear(nn.Linear(32, 32), 8) for _ in range(2))
        self.looks = looks
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        made = self.first(x).softmax(-1)
        if self.looks and ctypes.c_float.from_address(x.data_ptr()).value > 3:  # nothing that torch would notice
            made = made + 1
        return (self.second(made),)


@pytest.mark.slow
@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
@torch.inference_mode()
def test_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    plain, network = Layers(), Layers()
    network.first, network.second = plain.first, plain.second
    graphs = NetworkGraphs(network.forward, CPU, CpuRecorder(libraries()[0]))
    for number in range(8):
        for rows in (3, 40):
            x = torch.randn(rows, 32) + number
            assert torch.equal(graphs(x)[0], plain(x)[0])
    assert network.calls == 2 * (USES + 1), "each is tried on other values"

    large = torch.randn(ARENA_BYTES // 4 // 32, 32)
    for _ in range(USES + 2):
        [made] = graphs(large)
        assert torch.equal(made, plain(large)[0])
    assert network.calls == 2 * (USES + 1) + USES + 2, "none is made twice"
    assert not caplog.text

    looking = NetworkGraphs(Layers(looks=True).forward, CPU, CpuRecorder(libraries()[0]))
    for number in range(USES + 2):
        x = torch.full((3, 32), 5.0 if number != USES + 1 else 1.0)
        assert bool((looking(x)[0] == looking(x)[0]).all())
    assert "a replay on other values gives a different result" in caplog.text


def by_data(x: torch.Tensor, flag: torch.Tensor, number: torch.Tensor) -> Any:
    return (x + 1 if x.sum() > 0 else x - 1,)


def by_boolean(x: torch.Tensor, flag: torch.Tensor, number: torch.Tensor) -> Any:
    return (x + 1 if flag else x - 1,)


def by_integer(x: torch.Tensor, flag: torch.Tensor, number: torch.Tensor) -> Any:
    return (x * int(number),)


def by_length(x: torch.Tensor, flag: torch.Tensor, number: torch.Tensor) -> Any:
    return (torch.cat([x[:number], -x[number:]]),)


def by_address_of_boolean(x: torch.Tensor, flag: torch.Tensor, number: torch.Tensor) -> Any:
    return (x + 1 if ctypes.c_bool.from_address(flag.data_ptr()).value else x - 1,)


def by_address_of_integer(x: torch.Tensor, flag: torch.Tensor, number: torch.Tensor) -> Any:
    return (x * ctypes.c_int64.from_address(number.data_ptr()).value,)


@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
@pytest.mark.parametrize(
    "network", [by_data, by_boolean, by_integer, by_length, by_address_of_boolean, by_address_of_integer]
)
@torch.inference_mode()
def test_a_network_that_decides_by_values_is_never_played_back(
    network: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    graphs = NetworkGraphs(network, CPU, CpuRecorder(libraries()[0]))
    plain = NetworkGraphs(lambda x, flag, number: (x * 2 + flag + number,), CPU, graphs._replayer)
    for _ in range(USES + 1):  # the recorder has tried another network, and found it faithful
        plain(torch.ones(3), torch.tensor(True), torch.tensor(2))
    assert not caplog.text
    for call_number in range(2 * USES):
        one = call_number != USES  # what was recorded, were it so, is met by what differs
        given = torch.full((3,), 1.0 if one else -1.0), torch.tensor(one), torch.tensor(2 if one else 1)
        assert torch.equal(graphs(*given)[0], network(*given)[0])
    assert "calls of the network cannot be recorded" in caplog.text


@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
@torch.inference_mode()
def test_each_shape_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    """A network that decides by values for long inputs alone."""

    def forward(x: torch.Tensor) -> Any:
        looks = len(x) > 4 and ctypes.c_float.from_address(x.data_ptr()).value > 3
        return (x + 1 if looks else x * 2,)

    graphs = NetworkGraphs(forward, CPU, CpuRecorder(libraries()[0]))
    for rows in (3, 5):
        for number in range(2 * USES):
            x = torch.full((rows,), 5.0 if number != USES else 1.0)
            assert torch.equal(graphs(x)[0], forward(x)[0])
    assert "a replay on other values gives a different result" in caplog.text


@pytest.mark.skipif(not libraries(), reason="the kernels were not compiled, or not for this CPU")
@torch.inference_mode()
def test_masks_and_indices_are_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    """Values that only choose among numbers on the device, and rows of a mask that lets nothing through, are played
    back: NaN is equal to NaN."""
    table, calls = torch.randn(6, 4), []

    def forward(x: torch.Tensor, mask: torch.Tensor, places: torch.Tensor) -> Any:
        calls.append(len(x))
        return ((x + table[places]).masked_fill(~mask, float("-inf")).softmax(-1),)

    graphs = NetworkGraphs(forward, CPU, CpuRecorder(libraries()[0]))
    for number in range(2 * USES):
        mask = torch.ones(2, 4, dtype=torch.bool)
        mask[0, number % 4] = False
        given = torch.randn(2, 4), mask, torch.tensor([number % 6, 5])
        before = len(calls)
        made = graphs(*given)[0]
        assert len(calls) - before == (1 if number < USES - 1 else 2 if number == USES - 1 else 0)
        torch.testing.assert_close(made, forward(*given)[0])
    assert not caplog.text


def test_what_a_recording_reads_and_did_not_make_is_held() -> None:
    table, weight, unread = torch.randn(4), torch.randn(3, 4), torch.randn(4)
    with Outside() as outside:
        made = torch.ones(3, 4) + weight[1:].sum(0)
        for _ in range(20):  # memory of what is gone comes again
            made = torch.cat([made * 2, made])[:3].reshape(3, 4) + table
    held = {tensor.untyped_storage().data_ptr() for tensor in outside.tensors.values()}
    assert held == {table.data_ptr(), weight.data_ptr()}
    assert unread.data_ptr() not in held


class Rotated(nn.Module):
    """A block that reads a table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * table


@torch.inference_mode()
def test_a_recording_of_compiled_blocks_holds_what_they_read_and_not_what_they_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    def unseen(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Compiled code: its kernels read tensors without torch."""

        def run(*given: Any) -> Any:
            ran.append(graph)
            with _disable_current_modes():
                return graph(*given)

        return run

    monkeypatch.setenv("CXX", "true")  # nothing is given to it
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(unseen)
    try:
        blocks = [Rotated() for _ in range(3)]
        assert compile_forwards(blocks, "cpu") == 3
        made: list[weakref.ref[torch.Tensor]] = []

        def network(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            for block in blocks:
                x = block(x, table)
                made.append(weakref.ref(x))
                x = x + 1  # an operator of torch between them
            return x

        x, table = torch.ones(3, 4), torch.randn(4)
        expected = network(x, table)
        made.clear()
        ran.clear()
        with Outside() as outside:
            result = network(x, table)
        assert torch.equal(result, expected)
        assert len(ran) == 3, "what is recorded is the compiled code"
    finally:
        torch.compiler.set_default_backend(before)
    kept, weights = weakref.ref(table), [parameter for block in blocks for parameter in block.parameters()]
    del table
    gc.collect()
    assert kept() is not None, "nobody else has it"
    assert not any(one() is not None for one in made), "their memory serves the next block"
    held = {tensor.untyped_storage().data_ptr() for tensor in outside.tensors.values()}
    assert held == {tensor.untyped_storage().data_ptr() for tensor in (x, kept(), *weights)}
    del outside
    gc.collect()
    assert kept() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@torch.inference_mode()
def test_on_a_gpu() -> None:
    device = torch.device("cuda:0")  # as tensors have it
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to(device)
    recorder = CudaRecorder(device)
    graphs = NetworkGraphs(network.forward, device, recorder)
    for _ in range(USES + 3):
        x = torch.randn(4, 8, device=device)
        torch.testing.assert_close(graphs(x), network.forward(x))
    held = NetworkGraphs(lambda x: x.cpu().to(device) * 2, device, recorder)
    for number in range(USES + 2):  # looks at values on the host: cannot be recorded
        assert torch.all(held(torch.full((2,), float(number), device=device)) == 2 * number)
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    assert torch.isfinite(torch.randn(4, device=device)).all(), "the generator is not left in a capture"
    assert torch.cuda.get_sync_debug_mode() == 0
