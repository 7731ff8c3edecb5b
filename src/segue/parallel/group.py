"""Process groups of one replica: collectives over Gloo on CPUs and NCCL on GPUs.

Each is a separate process group instead of torch's default one, so nothing global is set; libraries that need the
default one get it on demand (`Group.open_default`). Ranks find each other through a file. Gloo listens on the loopback
interface, on ports that the kernel chooses.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import BroadcastOptions, FileStore

_PATIENCE = timedelta(minutes=30)
"""Time that a rank waits in a collective for the others, which may still be loading."""
_INTERFACE = "lo"


class ReplicaBroken(SystemExit):
    """The ranks are out of step: this process must end, so that the whole replica is restarted.

    Not an `Exception`, because no request failed: requests continue elsewhere.
    """


class Group:
    """Rank `rank` of `size`; rank 0 is the leader. All ranks must make the same calls in the same order."""

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device) -> None:
        """Wait for the other ranks. `meeting`: a file that no other group has used; `device`: this rank's."""
        self.rank = rank
        self.size = size
        self.device = device
        self._meeting = meeting
        self._default = False
        """Whether torch's default process group is open."""
        store = FileStore(str(meeting), size)
        self._backend: Any = _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        self._backend.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n, …] of every rank → [size * n, …], rank by rank."""
        gathered = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        self._backend._allgather_base(gathered, tensor.contiguous()).wait()
        return gathered

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the leader's tensor to the others' (contiguous, with the same shape and dtype), in place."""
        self._backend.broadcast([tensor], BroadcastOptions()).wait()
        return tensor

    def open_default(self) -> None:
        """Create torch's default process group with the same ranks, unless it exists: for libraries that support no
        other. The process then belongs to this replica. Sizes go over Gloo, tensors on a GPU over NCCL."""
        if self._default:
            return
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _INTERFACE)  # the only way to set this group's interface
        on_gpu = self.device.type == "cuda"
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo",
            store=FileStore(f"{self._meeting}.default", self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=_PATIENCE,
            device_id=self.device if on_gpu else None,
        )
        self._default = True

    def close_default(self) -> None:
        """Undo `open_default`."""
        if self._default:
            distributed.destroy_process_group()
        self._default = False


# torch's stubs omit most of the backends


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
