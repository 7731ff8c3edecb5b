"""The ways to be faster with a loss, as sides of `segue bench diffusion --losses`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

from segue.bench.diffusion_sides import SEGUE, ChangedDriver, PictureDriver, SegueDriver, cached, changed
from segue.bench.diffusion_workload import PictureOutcome, PictureRequest
from segue.bench.loss_files import rank_of, write_gguf, write_untrained_lora
from segue.models.registry import read_config

QUANTIZATIONS = ("int8", "int4", "fp8")
GGUF_TYPES = ("Q8_0", "Q4_0")
INTERVAL = (0.2, 0.8)
"""Of the steps, between which there is guidance."""
_ADAPTER = "few"


@dataclass(frozen=True, slots=True)
class FewSteps:
    """An adapter that was trained for few steps without guidance."""

    steps: int
    adapter: Path | None
    """None: one that changes nothing, for its speed."""


class FewStepsDriver:
    """A Segue of its own, with an adapter: every picture in the same few steps, without a second row for guidance."""

    def __init__(self, segue: SegueDriver, few: FewSteps, adapter: Path, distilled: bool) -> None:
        """`distilled`: guidance is a number that the network is told, which stays."""
        lora = {"adapters": {_ADAPTER: str(adapter)}, "max_rank": max(1, rank_of(adapter))}
        trained = "" if few.adapter is not None else "untrained "
        self._segue = segue.with_denoiser(f"{few.steps} steps with {trained}LoRA", {"lora": lora})
        self.name = self._segue.name
        none: dict[str, Any] = {"true_cfg_scale": 1.0} if segue.true_cfg else {"guidance_scale": 0.0}
        self._changes = {"num_inference_steps": few.steps, **({} if distilled else none)}

    @property
    def startup(self) -> float:
        return self._segue.startup

    async def start(self) -> None:
        await self._segue.start()

    async def take_over(self, together: int) -> None:
        """As for Segue."""

    async def hand_over(self) -> None:
        """As for Segue."""

    async def stop(self) -> None:
        await self._segue.stop()

    async def run(self, request: PictureRequest) -> PictureOutcome:
        asked = msgspec.structs.replace(self._segue.asked(request), adapter=_ADAPTER)
        return await self._segue.make(changed(asked, **self._changes), request)


@dataclass(frozen=True, slots=True)
class Ways:
    """What there is to measure; nothing of it is started."""

    same: list[PictureDriver]
    """Of the exact Segue, asked for something else."""
    own: list[PictureDriver]
    """Each with weights of its own."""
    refused: list[str]
    """What cannot be measured, with the reason."""


def faster_sides(
    exact: SegueDriver, caches: Sequence[tuple[str, float | None]], guidance: float, few: FewSteps, files: Path
) -> Ways:
    """All of them. `files`: a directory to write to."""
    network = exact.model_dir / ("transformer" if "transformer" in read_config(exact.model_dir) else "unet")
    distilled = bool(read_config(network).get("guidance_embeds"))
    same: list[PictureDriver] = [cached(exact, *cache) for cache in caches]
    if guidance > 1 and not distilled:
        interval = f"guidance_interval {INTERVAL[0]:g}-{INTERVAL[1]:g}"
        same.append(ChangedDriver(interval, exact, guidance_interval=INTERVAL))
    kinds = QUANTIZATIONS if torch.cuda.is_available() else ("bfloat16", *QUANTIZATIONS)  # on a GPU that is a dtype
    own: list[PictureDriver] = [exact.with_denoiser(kind, {"quantization": kind}) for kind in kinds]
    refused = []
    if find_spec("gguf") is None:
        refused.append(f"{SEGUE}, GGUF: needs the package gguf")
    else:
        for kind in GGUF_TYPES:
            file = files / f"{kind}.gguf"
            write_gguf(network, file, kind)
            own.append(exact.with_denoiser(f"GGUF {kind}", {"gguf": str(file)}))
    adapter = few.adapter
    if adapter is None:
        adapter = files / "untrained.safetensors"
        write_untrained_lora(network, adapter)
    own.append(FewStepsDriver(exact, few, adapter, distilled))
    return Ways(same, own, refused)
