"""The lossy optimisations, as sides of `segue bench diffusion --losses`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

from segue.bench.diffusion.loss_files import rank_of, write_gguf, write_untrained_lora
from segue.bench.diffusion.sides import SEGUE, ChangedDriver, ImageDriver, SegueDriver, cached, changed
from segue.bench.diffusion.workload import ImageOutcome, ImageRequest
from segue.models.registry import read_config

QUANTIZATIONS = ("int8", "int4", "fp8")
GGUF_TYPES = ("Q8_0", "Q4_0")
INTERVAL = (0.2, 0.8)
"""Interval of the steps, as shares, within which guidance applies."""
_ADAPTER = "few"


@dataclass(frozen=True, slots=True)
class FewSteps:
    """A LoRA adapter trained for few steps without guidance."""

    steps: int
    adapter: Path | None
    """None: an untrained one, to measure its speed."""


class FewStepsDriver:
    """A separate Segue with a LoRA adapter: every image in the same few steps, without a guidance row."""

    def __init__(self, segue: SegueDriver, few: FewSteps, adapter: Path, distilled: bool) -> None:
        """`distilled`: the guidance scale is an input of the network, which stays."""
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
        """Delegates to Segue."""

    async def hand_over(self) -> None:
        """Delegates to Segue."""

    async def stop(self) -> None:
        await self._segue.stop()

    def processes(self) -> dict[int, str]:
        return self._segue.processes()

    async def run(self, request: ImageRequest) -> ImageOutcome:
        asked = msgspec.structs.replace(self._segue.asked(request), adapter=_ADAPTER)
        return await self._segue.make(changed(asked, **self._changes), request)


@dataclass(frozen=True, slots=True)
class Ways:
    """The optimisations to measure; none is started."""

    same: list[ImageDriver]
    """Run on the exact Segue with changed requests."""
    own: list[ImageDriver]
    """Run with separate weights each."""
    refused: list[str]
    """Those that cannot be measured, with the reason."""


def faster_sides(
    exact: SegueDriver, caches: Sequence[tuple[str, float | None]], guidance: float, few: FewSteps, files: Path
) -> Ways:
    """All lossy optimisations. `files`: a directory to write to."""
    network = exact.model_dir / ("transformer" if "transformer" in read_config(exact.model_dir) else "unet")
    distilled = bool(read_config(network).get("guidance_embeds"))
    same: list[ImageDriver] = [cached(exact, *cache) for cache in caches]
    if guidance > 1 and not distilled:
        interval = f"guidance_interval {INTERVAL[0]:g}-{INTERVAL[1]:g}"
        same.append(ChangedDriver(interval, exact, guidance_interval=INTERVAL))
    # on a GPU bfloat16 is the dtype already
    kinds = QUANTIZATIONS if torch.cuda.is_available() else ("bfloat16", *QUANTIZATIONS)
    own: list[ImageDriver] = [exact.with_denoiser(kind, {"quantization": kind}) for kind in kinds]
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
