"""What tests of connectors between processes share: a connector in a process of its own, and who has hung up."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connector_peer import receive, send
from taking import take

from segue.bench.harness.process import python_path
from segue.connectors.shm.connector import SharedMemoryConnector
from shm_names import abandoned

MIB = 1 << 20
HERE = Path(__file__).parent


class Peer:
    """A connector in a process of its own."""

    def __init__(self, address: str, pool_bytes: int = MIB, max_bytes: int = 2 * MIB, device: str = "none") -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "connector_peer.py"), address, str(pool_bytes), str(max_bytes), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        )

    def ready(self) -> None:
        assert receive(self.process.stdout) == "ready"

    def __call__(self, *message: Any) -> Any:
        send(self.process.stdin, message)
        return receive(self.process.stdout)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def peers(*addresses: str, **settings: Any) -> Iterator[list[Peer]]:
    started = [Peer(address, **settings) for address in addresses]
    try:
        for peer in started:
            peer.ready()
        yield started
    finally:
        for peer in started:
            peer.end()


def wait_for_hang_ups(producer: SharedMemoryConnector) -> None:
    """Return when the producer's thread has seen every hang-up so far: it answers a newcomer's second packet later."""
    ok, _, metadata = producer.put("a", "b", "newcomer", {})
    assert ok
    newcomer = SharedMemoryConnector(f"newcomer-{os.getpid()}", pool_bytes=4096, max_bytes=4096)
    assert take(newcomer, "a", "b", "newcomer", metadata) is not None
    newcomer.release("newcomer")
    newcomer.close()


def names_left() -> set[str]:
    """Files in /dev/shm that nobody uses, and sockets that bear this test's process number: another Segue may run
    on the machine."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    sockets = {name for name in names if "segue-shm" in name and name.endswith(f"-{os.getpid()}")}
    return abandoned() | sockets
