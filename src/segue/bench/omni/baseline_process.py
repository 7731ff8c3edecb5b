"""`python -m segue.bench.omni.baseline_process SOCKET_FD OPTIONS`: serve the baseline in its own process.

It takes one request at a time, or up to `Policy.max_batch` together.
"""

from __future__ import annotations

import sys

from segue.bench.harness.channel import Channel, serve
from segue.bench.omni.baseline import Loaded, Options, Policy
from segue.bench.omni.workload import BenchRequest


def main(argv: list[str]) -> int:
    return serve(argv, Options, Policy, BenchRequest, _run)


def _run(channel: Channel[Policy, BenchRequest], options: Options) -> None:
    from segue.bench.omni.reference import Reference, torch

    reference = Reference(options)
    channel.send(Loaded(torch.get_num_threads()))
    policy = Policy(1, 0.0)
    while (message := channel.take()) is not None:
        if isinstance(message, Policy):
            policy = message
            continue
        for answer in reference.generate(channel.gather(message.request, policy.max_batch, policy.gather)):
            channel.send(answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
