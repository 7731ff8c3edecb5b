"""The second rank of a denoiser without a model, whose memory is bounded:
`python row_rank_fake.py FD MEETING BYTES TAKEN` follows rank 0 at FD, may have BYTES more than it has when it begins,
and takes TAKEN in the middle of a call."""

from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusion_fakes import Ask, FakeDenoiser

from segue.engines.diffusion.contract import Row
from segue.engines.diffusion.engine import DiffusionEngine
from segue.engines.diffusion.sharing import Sharing
from segue.engines.ranks import follow
from segue.parallel.ranks import Ranks
from segue.parallel.ways import Shape, Ways, meet

CPU = torch.device("cpu")
ROW = 1 << 30
"""Bytes: far more than threads that start later take of the address space."""
SHAPE = Shape(weights=2)
ASKS = (Ask("one", calls=2), Ask("other", calls=2))


@dataclass
class Exchanging(FakeDenoiser):
    """Its ranks wait for each other twice in a call; in between, this one takes memory."""

    ways: Ways | None = None
    taken: int = 0

    def predict(self, rows: Sequence[Row]) -> Sequence[torch.Tensor]:
        assert self.ways is not None
        assert self.ways.network is not None
        self.ways.network.all_reduce(torch.zeros(1))
        if self.taken:
            torch.empty(self.taken, dtype=torch.uint8)
        self.ways.network.all_reduce(torch.zeros(1))
        return super().predict(rows)


def exchanging(ways: Ways, taken: int = 0) -> Exchanging:
    fake = Exchanging(bytes_per_token=ROW // ASKS[0].tokens, ways=ways, taken=taken)
    fake.asks.update({ask.name: ask for ask in ASKS})
    return fake


def engine_of(fake: Exchanging, ways: Ways, ranks: Ranks) -> DiffusionEngine:
    return DiffusionEngine(fake, None, Sharing(fake, ways, ranks), ranks)


def main() -> None:
    end, meeting, more, taken = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    ways = meet(1, SHAPE, meeting, CPU)
    [now] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize:")]
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(now.split()[1]) * 1024 + more, hard))
    with socket.socket(fileno=end) as near, torch.inference_mode():
        ranks = Ranks(ways.everyone, [near])
        follow(engine_of(exchanging(ways, taken), ways, ranks), ranks)


if __name__ == "__main__":
    main()
