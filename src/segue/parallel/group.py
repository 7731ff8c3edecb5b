"""The processes of one replica: collectives between them, over Gloo on CPUs and NCCL on GPUs.

A process group of its own and not torch's default one, so that nothing global is set. Ranks find each other by a file.
Gloo listens on the loopback interface, on ports of the kernel's choice.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import BroadcastOptions, FileStore

_PATIENCE = timedelta(minutes=30)
"""How long a rank waits in a collective for the others, which may still be loading."""
_INTERFACE = "lo"


class ReplicaBroken(SystemExit):
    """The ranks are no longer in step: this process must end, so that the whole replica is started again.

    No `Exception`, as it is not the failure of a request: those go on elsewhere.
    """


class Group:
    """Rank `rank` of `size`; rank 0 leads. All ranks must make the same calls in the same order."""

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device) -> None:
        """Waits for the other ranks. `meeting`: a file that no other group has used; `device`: this rank's."""
        self.rank = rank
        self.size = size
        self.device = device
        store = FileStore(str(meeting), size)
        self._backend: Any = _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        self._backend.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n, …] of every rank → [size * n, …], rank by rank."""
        gathered = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        self._backend._allgather_base(gathered, tensor.contiguous()).wait()
        return gathered

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leader's, written into this one (contiguous) of the same shape and dtype on the others."""
        self._backend.broadcast([tensor], BroadcastOptions()).wait()
        return tensor


# torch's stubs know little of the backends


def _gloo(store: FileStore, rank: int, size: int) -> Any:
    backend: Any = distributed.ProcessGroupGloo
    options = backend._Options()
    options._timeout = _PATIENCE
    options._devices = [backend.create_device(interface=_INTERFACE)]
    return backend(store, rank, size, options)


def _nccl(store: FileStore, rank: int, size: int) -> Any:
    backend: Any = distributed.ProcessGroupNCCL  # not in a torch built for CPUs
    options = backend.Options()
    options._timeout = _PATIENCE
    return backend(store, rank, size, options)
