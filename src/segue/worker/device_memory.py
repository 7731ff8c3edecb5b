"""What a stage may use of a GPU, once its worker can ask the device.

A plan is made without CUDA, from what `nvidia-smi` says of whole GPUs. Of an instance of one (MIG) it says nothing, nor
of a GPU that has the machine's memory for its own; and a process sees an instance in the place of the GPU where it is
cut up, whatever was said of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from segue.graph.deployment import StagePlan


def total_memory(device: torch.device) -> int:
    """Bytes of a CUDA device, as CUDA sees it; who else uses it does not matter."""
    return torch.cuda.get_device_properties(device).total_memory


def on_device(plan: StagePlan, device: torch.device, total: Callable[[torch.device], int] = total_memory) -> StagePlan:
    """The plan with no more memory than its share of the device that its worker runs on."""
    if device.type != "cuda" or not plan.memory_share:
        return plan
    there = int(plan.memory_share * total(device))
    return replace(plan, memory_bytes=min(plan.memory_bytes or there, there))
