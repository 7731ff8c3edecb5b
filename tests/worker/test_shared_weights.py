"""Workers of a stage share their weights in a memfd: what is equal is mapped, and nothing else changes."""

from __future__ import annotations

import copy
import fcntl
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.linear.linear import PackedLinear
from segue.worker.process.shared_weights import LEAST_BYTES, one_at_a_time, share

WIDE = 256


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


class Net(nn.Module):
    """A tied table, a joined weight of which two layers see a part, a half precision buffer, and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDE, WIDE)
        self.head = nn.Linear(WIDE, WIDE, bias=False)
        self.head.weight = self.table.weight
        joined = torch.randn(2 * WIDE, WIDE)
        self.first, self.second = (nn.Linear(WIDE, WIDE) for _ in range(2))
        self.first.weight = nn.Parameter(joined[:WIDE])
        self.second.weight = nn.Parameter(joined[WIDE:])
        self.register_buffer("scale", torch.randn(WIDE, 2 * WIDE).half().t())
        self.packed: nn.Module = nn.Linear(WIDE, WIDE)
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(self.table(ids)))
        return self.head(self.packed(x)) @ self.scale[:WIDE].float()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    made = Net().eval()
    if cpu_kernels() is not None:  # in panels, as a stage's network is
        made.packed = PackedLinear(made.packed, 8)  # type: ignore[arg-type]
    return made


def places(network: nn.Module) -> dict[str, str]:
    """Tensor → what its memory is mapped from."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in line[0].split("-")), line[5] if len(line) > 5 else "") for line in lines]
    return {
        name: next(path for start, end, path in spans if start <= tensor.data_ptr() < end)
        for name, tensor in network.state_dict(keep_vars=True).items()
    }


IDS = torch.arange(WIDE)


def test_the_first_worker_fills_and_the_next_ones_map(memfd: int) -> None:
    one, other = net(), net()
    wanted = one(IDS)
    with one_at_a_time(memfd):
        shared = share(memfd, one.modules())
    weights = 4 * 4 * WIDE * WIDE + 2 * WIDE * 2 * WIDE
    assert weights <= shared <= 1.1 * weights
    with one_at_a_time(memfd):
        assert share(memfd, other.modules()) == shared
    for network in (one, other):
        found = places(network)
        assert {name for name, path in found.items() if path == "/memfd:test"} >= {
            "table.weight",
            "first.weight",
            "scale",
        }
        assert "/memfd:test" not in found["first.bias"], "too small"
        assert network.head.weight is network.table.weight
        assert torch.equal(network(IDS), wanted)
    assert one.table.weight.data_ptr() != other.table.weight.data_ptr()


def test_only_equal_weights_are_shared(memfd: int) -> None:
    one, other = net(), net()
    other.table.weight[WIDE // 2, 3] += 1
    wanted = other(IDS)
    whole = share(memfd, one.modules())
    assert share(memfd, other.modules()) == whole - 4 * WIDE * WIDE
    assert torch.equal(other(IDS), wanted)
    assert share(memfd, net(1).modules()) == 0


def test_who_writes_to_a_weight_has_a_copy(memfd: int) -> None:
    one, other = net(), net()
    share(memfd, one.modules())
    share(memfd, other.modules())
    one.table.weight.zero_()
    assert other.table.weight.count_nonzero() == WIDE * WIDE
    third = net()
    assert share(memfd, third.modules())
    assert torch.equal(third(IDS), other(IDS))
    with pytest.raises(PermissionError):
        os.pwrite(memfd, b"\0" * 4096, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memfd, 0)


def test_weights_are_shared_once_and_files_not_at_all(memfd: int, tmp_path: Path) -> None:
    one = net()
    assert share(memfd, one.modules()) > 0
    again = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    assert share(again, one.modules()) == 0, "they are mapped already"
    os.close(again)
    path = tmp_path / "weights"
    path.write_bytes(bytes(LEAST_BYTES))
    with open(path, "rb") as file:
        layer = nn.Linear(16, LEAST_BYTES // 64, bias=False).requires_grad_(False)
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    layer.weight.set_(torch.frombuffer(mapped, dtype=torch.float32).view(LEAST_BYTES // 64, 16))
    assert share(memfd, [layer]) == 0


def test_a_worker_that_dies_while_it_fills_leaves_it_to_the_next(memfd: int) -> None:
    """kill -9 while it holds the lock: the next one has it at once, and starts anew."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        fcntl.lockf(memfd, fcntl.LOCK_EX)
        os.pwrite(memfd, b"\xff" * (3 << 20), 0)
        os.write(write, b".")
        signal.pause()
    os.read(read, 1)
    with pytest.raises(OSError, match="temporarily unavailable"):
        fcntl.lockf(memfd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    one, other = net(), net()
    with one_at_a_time(memfd):
        shared = share(memfd, one.modules())
    assert shared
    assert share(memfd, copy.deepcopy(other).modules()) == shared


def test_a_memfd_that_cannot_be_filled_changes_nothing(memfd: int, caplog: pytest.LogCaptureFixture) -> None:
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    one = net()
    wanted = one(IDS)
    assert share(memfd, one.modules()) == 0
    assert "not shared between the workers" in caplog.text
    assert torch.equal(one(IDS), wanted)
