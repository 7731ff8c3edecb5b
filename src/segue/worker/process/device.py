"""Select a worker's device when it starts, with an error that gives the reason if that is impossible, and correct the
planned memory once CUDA reports the real size.

A plan is made without CUDA, from the sizes that `nvidia-smi` reports for whole GPUs. It reports none for a MIG instance
or for a GPU that shares the machine's memory; and a process sees an instance in place of a GPU that is divided, with
less memory than planned.

Optional reading: called once, at load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, cast

import torch

from segue.graph.deployment.stage_plan import StagePlan
from segue.messages.errors import ConfigError


def total_memory(device: torch.device) -> int:
    """Return the bytes of a CUDA device as CUDA reports them, including memory that other processes use."""
    return torch.cuda.get_device_properties(device).total_memory


def on_device(plan: StagePlan, device: torch.device, total: Callable[[torch.device], int] = total_memory) -> StagePlan:
    """Return the plan with at most its share of the real memory of its worker's device."""
    if device.type != "cuda" or not plan.memory_share:
        return plan
    there = int(plan.memory_share * total(device))
    return replace(plan, memory_bytes=min(plan.memory_bytes or there, there))


class Cuda(Protocol):
    """The functions of `torch.cuda` that are used."""

    def _is_compiled(self) -> bool: ...

    def _is_in_bad_fork(self) -> bool: ...

    def device_count(self) -> int: ...

    def set_device(self, device: torch.device) -> None: ...


def work_on(
    device: torch.device,
    cuda: Cuda = cast(Cuda, torch.cuda),  # noqa: B008
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Make a CUDA device the current one of this process, for kernels that are not torch's and for pinned memory.
    Raises `ConfigError` if the process cannot use it."""
    if device.type != "cuda":
        return
    if not cuda._is_compiled():
        raise ConfigError(
            f"{device} cannot be used: torch {torch.__version__} is a build for CPUs; install one for CUDA",
            field="devices",
        )
    if cuda._is_in_bad_fork():
        raise ConfigError(
            f"{device} cannot be used: CUDA was initialised before this worker was forked, which CUDA does not allow. "
            "A module of the model's family, or one that it imports, asked CUDA for devices; libraries do so if "
            "NVIDIA's management library (libnvidia-ml.so.1) is missing, as in a container without "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            field="devices",
        )
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32 in convolutions, too, as it is in products
    try:
        cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that there is a driver
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        limited = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        raise ConfigError(
            f"{device} cannot be used: {str(error).strip().partition(chr(10))[0]} (torch {torch.__version__} for CUDA "
            f"{torch.version.cuda} sees {cuda.device_count()} devices{limited})",
            field="devices",
        ) from error
