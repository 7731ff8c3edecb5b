"""The options of `segue bench hosts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from segue.bench.harness.arguments import ModelBench, counts, execute, option, some_of
from segue.bench.hosts.network import Network, two_hosts
from segue.cli.parser import count
from segue.messages.errors import ConfigError

PARTS = ("hops", "jct", "loss", "limit")
SIZES = ("tiny", "small", "medium")
NEEDS = ("psutil",)
_ASSETS = Path(__file__).parents[4] / "assets"


@dataclass(frozen=True, kw_only=True)
class HostsBench(ModelBench):
    """Settings of a run."""

    parts: Sequence[str] = option(list(PARTS), f"of {','.join(PARTS)} (default: all)", type=some_of(PARTS, "part"))
    kib: Sequence[int] = option(
        [4, 64, 1024, 10240, 65536], "sizes of payloads in KiB (default: 4,64,1024,10240,65536)", type=counts
    )
    hop_rounds: int = option(50, "per size, at least 2 (default: 50)", type=count)
    size: str = option("small", "of the Qwen2.5-Omni preset (default: small)", choices=SIZES, exclusive=True)
    assets: Path = option(_ASSETS, "photo, speech and video", type=Path)
    workers: Sequence[int] = option([1, 2, 4], "of talker and vocoder, over two hosts (default: 1,2,4)", type=counts)
    concurrency: Sequence[int] = option([1, 4], "clients (default: 1,4)", type=counts)
    requests: int = option(8, "per side and round, at least as many as clients (default: 8)", type=count)
    rounds: int = option(3, type=count)
    simulated: Sequence[int] = option([10, 100, 1000], "simulated workers (default: 10,100,1000)", type=counts)
    steps: Sequence[int] = option([1, 32], "emissions of a simulated request (default: 1,32)", type=counts)
    together: int = option(256, "clients of the simulated workers (default: 256)", type=count)
    seconds: float = option(10.0, "that each number of simulated workers is measured (default: 10)", type=float)
    network: Network | None = None
    """The hosts; made by `start`."""

    @property
    def hosts(self) -> Network:
        assert self.network is not None, "made by `start`"
        return self.network


def start(bench: HostsBench) -> int:
    """Run on two hosts that are made, and removed. Raises `ConfigError` for values that measure nothing."""
    # with torch: not for --help
    from segue.bench.hosts.hosts import run
    from segue.bench.hosts.results import markdown
    from segue.bench.omni.checkpoint import make_preset

    if bench.hop_rounds < 2:
        raise ConfigError(f"--hop-rounds is {bench.hop_rounds}; it must be at least 2", field="hop_rounds")
    if not bench.seconds > 0:
        raise ConfigError(f"--seconds is {bench.seconds:g}; it must be above 0", field="seconds")
    if bench.model is None and {"jct", "loss"} & set(bench.parts):
        bench = replace(bench, model=make_preset(bench.cache, bench.size))
    with two_hosts() as network:
        return execute(replace(bench, network=network), "hosts", run, markdown)
