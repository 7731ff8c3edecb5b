"""Start workers. On one machine, they are forked from a fork server that this module starts and monitors."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import segue
from segue.graph.deployment.deployment import Hardware
from segue.messages.addresses import Network
from segue.messages.errors import ConfigError
from segue.messages.process import (
    MESSAGE_BYTES,
    Exited,
    FromForkServer,
    Kill,
    Preloaded,
    PreloadFailed,
    Spawn,
    Spawned,
    ToForkServer,
    WorkerSpec,
    encode,
    from_fork_server,
)
from segue.observe.logging import configured


@dataclass(frozen=True, slots=True)
class Host:
    """Where the workers of one node live."""

    runtime_dir: str
    """A private directory for sockets and spilled payloads; deleted when the node's fork server ends."""
    network: Network | None = None
    """None: all workers are on one host."""
    hardware: Hardware | None = None
    """Of a node, as it says; None: of the server's host, which the plan knows."""


class Placement(Protocol):
    """Starts workers and reports their exits."""

    @property
    def runtime_dir(self) -> str:
        """A private directory for sockets and spilled payloads; deleted by `close`, and after a crash."""

    @property
    def no_kernels(self) -> str:
        """Why workers have no compiled kernels for the CPU; empty if they have them. Known after `start`."""

    async def start(self) -> None:
        """Prepare to spawn workers. Raises `ConfigError` with the workers' own import error."""

    def host(self, node: str) -> Host | None:
        """Return where workers of a node live; None while it has not joined."""

    def may_have(self, node: str) -> bool:
        """Whether a node is there, or comes if it is needed."""

    def need(self, nodes: Set[str]) -> None:
        """Say which nodes have workers, or wait for some; others may be given back."""

    def spawn(self, spec: WorkerSpec, node: str) -> None:
        """Start a worker; `on_spawned` and later `on_exit` are called for it."""

    def kill(self, pid: int, node: str) -> None:
        """SIGKILL a worker."""

    async def restart(self) -> None:
        """Prepare again to spawn workers on this host, after `on_lost`; raises as `start`. `runtime_dir` is another."""

    async def close(self) -> None:
        """End all processes that still run."""


WORKER_ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "GOMP_SPINCOUNT": "20000",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of workers, unless the caller's own sets a variable; read when memory is allocated for the first time.

Large tensors use huge pages: every step reads all weights, and page table walks cost a quarter of a decode step (387M
parameters in float32, 2 cores: 88 → 67 ms). Memory of a layer's results is reused instead of being returned to the
system, which zeroes it anew for the next layer: 1024 tokens of prefill take 11% less time (4.10 → 3.65 s).

GEMM threads that wait for one another sleep after some 400 µs: on a shared machine, the thread they wait for may have
no core because of them. With six busy neighbours on two cores, 60 small GEMMs take 960 ms with OpenMP's default (it
spins for milliseconds), 190 ms with this setting, and 64 ms with a tenth of it; but on an idle machine a tenth would
make a step of a small model 15% slower (33M parameters: 11 → 13 ms), while this setting costs nothing.

torch asks NVML, not CUDA, whether there is a GPU: some libraries query it on import (diffusers does), and a fork of a
process that has initialised CUDA cannot use it. CUDA numbers devices like `nvidia-smi` and NVML, on which plans are
based; by default it puts the fastest first.

Checkpoints are read from disk: if a file is missing, the libraries must not ask the hub for it, which takes minutes
behind a firewall that drops packets."""


class LocalPlacement:
    """Workers on this machine, forked from one process that has imported `preload`."""

    def __init__(
        self,
        preload: list[str],
        *,
        gpus: bool = True,
        on_spawned: Callable[[str, int], None],
        on_exit: Callable[[str, str], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`on_exit(worker, how)`; `on_lost()`: the fork server itself died, and every worker with it. `gpus`: workers
        may see the machine's GPUs; if none needs one, hiding them keeps a hanging driver from blocking workers."""
        self._preload = preload
        self._hidden = {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
        self._on_spawned = on_spawned
        self._on_exit = on_exit
        self._on_lost = on_lost
        self.runtime_dir = ""
        self.no_kernels = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._preloaded: asyncio.Future[None] | None = None
        self._closing = False

    async def start(self) -> None:
        self._closing = False
        try:
            # short: a Unix socket path has at most 107 bytes
            self.runtime_dir = tempfile.mkdtemp(prefix="segue-", dir=_short_tmp())
        except OSError as error:
            raise ConfigError(f"cannot make a directory for sockets (TMPDIR): {error}", field="TMPDIR") from error
        loop = asyncio.get_running_loop()
        self._preloaded = loop.create_future()
        try:
            self._launch()
            assert self._control is not None
            loop.add_reader(self._control.fileno(), self._read)
            # shielded: `close` must see whether it is done, not that its waiter was cancelled
            await asyncio.shield(self._preloaded)
        except BaseException:
            await self.close()
            raise

    def _launch(self) -> None:
        """Start the fork server, and keep our end of the socket."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            source = str(Path(segue.__file__).parents[1])
            paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
            logs = configured()  # workers log alike, and so does what they import
            level, form = ("", "") if logs is None else (logs[0], "json" if logs[1] else "text")
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "segue.worker", str(theirs.fileno()), self.runtime_dir, level, form),
                    *self._preload,
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**WORKER_ENVIRONMENT, **os.environ, **self._hidden, "PYTHONPATH": os.pathsep.join(paths)},
            )

    def host(self, node: str) -> Host | None:
        """Every stage runs here."""
        return Host(self.runtime_dir)

    def may_have(self, node: str) -> bool:
        """This host is there."""
        return True

    def need(self, nodes: Set[str]) -> None:
        """This host stays."""

    def spawn(self, spec: WorkerSpec, node: str) -> None:
        self._send(Spawn(spec))

    def kill(self, pid: int, node: str) -> None:
        self._send(Kill(pid))

    async def restart(self) -> None:
        await self.close()
        await self.start()

    async def close(self) -> None:
        self._closing = True
        self._disconnect()
        process, self._process = self._process, None
        if process is not None:
            if self._preloaded is not None and not self._preloaded.done():
                process.kill()  # still importing: it has no children, and would not react for seconds
            await asyncio.get_running_loop().run_in_executor(None, process.wait)
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _send(self, message: ToForkServer) -> None:
        if self._control is None:
            return  # the fork server has died; its waiters are notified elsewhere
        try:
            self._control.send(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            return  # the reader sees the end of the stream and reports it

    def _disconnect(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None

    def _read(self) -> None:
        assert self._control is not None
        while self._control is not None:
            try:
                data = self._control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self._ended()
                return
            self._handle(from_fork_server.decode(data))

    def _handle(self, message: FromForkServer) -> None:
        assert self._preloaded is not None
        match message:
            case Preloaded():
                self.no_kernels = message.no_kernels
                self._preloaded.set_result(None)
            case PreloadFailed():
                self._preloaded.set_exception(ConfigError(f"workers cannot start: {message.message}"))
            case Spawned():
                self._on_spawned(message.worker, message.pid)
            case Exited():
                self._on_exit(message.worker, message.how)

    def _ended(self) -> None:
        """Handle the end of the fork server, which closed its socket: it is dead or dying."""
        assert self._preloaded is not None
        self._disconnect()
        if not self._preloaded.done():
            self._preloaded.set_exception(ConfigError("the fork server died while importing the model's modules"))
        elif not self._closing:
            self._on_lost()


def _short_tmp() -> str:
    """Return the usual temporary directory, unless its path is too long for sockets."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= 40 else "/tmp"
