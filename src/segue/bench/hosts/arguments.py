"""The options of `segue bench hosts`, and the two hosts of a run: network namespaces where they can be made, else this
machine's loopback interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from segue.bench.harness import namespaces
from segue.bench.harness.arguments import ModelBench, counts, execute, option, some_of
from segue.cli.parser import count
from segue.messages.errors import ConfigError

PARTS = ("hops", "jct", "loss", "limit")
SIZES = ("tiny", "small", "medium")
NEEDS = ("psutil",)
_ASSETS = Path(__file__).parents[4] / "assets"


@dataclass(frozen=True)
class Network:
    """Two hosts. This process is on the near one."""

    said: str
    """What they are, for the report."""
    near: namespaces.Host | namespaces.Loopback
    far: namespaces.Host | namespaces.Loopback

    @property
    def apart(self) -> bool:
        """Whether nobody else is on their network."""
        return isinstance(self.near, namespaces.Host)


@contextmanager
def two_hosts() -> Iterator[Network]:
    """Make two hosts; within it, the network of this thread, and of those it starts, is the near one's."""
    if not namespaces.possible():
        alone = namespaces.Loopback()
        yield Network("loopback: this machine makes no network namespaces", alone, alone)
        return
    with namespaces.hosts(2) as (near, far), namespaces.inside(near):
        yield Network("two network namespaces, joined by veth pairs and a bridge", near, far)


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
