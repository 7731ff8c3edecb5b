"""diffusers' schedulers: a new one for each sample, of the checkpoint's class or of one the request names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segue.media.sources import shown
from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import InvalidRequest, nearest
from segue.models.diffusion.library import LCMScheduler, SchedulerMixin
from segue.models.diffusion.loading import component_class

_BETAS = {"beta_start", "beta_end", "beta_schedule"}
"""What a scheduler says that adds noise by a table of variances."""


class Schedulers:
    """The schedulers a checkpoint can be sampled with."""

    def __init__(self, model_dir: Path, name: str = "scheduler") -> None:
        """`name`: the part of the pipeline. Raises `ConfigError`."""
        kind = component_class(model_dir, name)
        self.config: dict[str, Any] = dict(kind.load_config(model_dir / name, local_files_only=True))
        self._default = kind
        compatible = kind.from_config(self.config).compatibles
        if self.config.keys() >= _BETAS:  # for adapters distilled to few steps; diffusers lists it with none
            compatible = [*compatible, LCMScheduler]
        # of one that needs a package which is not there, diffusers gives a stand-in
        self._kinds = {
            one.__name__: one
            for one in (kind, *compatible)
            if issubclass(one, SchedulerMixin) and (one is kind or self._serves(one))
        }
        self.known: tuple[str, ...] = tuple(sorted(self._kinds))

    def _serves(self, kind: type[SchedulerMixin]) -> bool:
        """Not all that diffusers lists as compatible can step along the velocities of a flow, or has a table of
        variances: that of EDM needs noise levels that such a checkpoint does not say."""
        taken = inspect.signature(kind).parameters.keys()
        if self.config.get("prediction_type") == "flow_prediction" and "use_flow_sigmas" not in taken:
            return False
        return taken >= _BETAS or not self.config.keys() >= _BETAS

    def check(self, name: str | None) -> None:
        """Raise `InvalidRequest` for a scheduler that diffusers does not list as compatible with the checkpoint's, or
        cannot make of its settings."""
        self.make(name)

    def make(self, name: str | None = None) -> Any:
        """A new scheduler with the checkpoint's settings; its timesteps are not set. Raises `InvalidRequest`."""
        if name is None:
            return self._default.from_config(self.config)
        if name not in self._kinds:
            raise InvalidRequest(
                f"scheduler is {shown(name)}, which this model is not sampled with; known: {', '.join(self.known)}"
                f"{_meant(name, self.known)}",
                field="scheduler",
            )
        try:
            return self._kinds[name].from_config(self.config)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise InvalidRequest(
                f"scheduler is {shown(name)}, which is not made of this model's settings: {error}", field="scheduler"
            ) from error


def _meant(name: str, known: tuple[str, ...]) -> str:
    hint = nearest(name, known)
    return hint if hint.startswith("; did you mean") else ""


def shifted(config: Mapping[str, Any], tokens: int) -> float:
    """`mu` of a flow-matching scheduler for pictures of so many tokens: the straight line through its base and its
    largest size (Esser et al. 2024, section 5.3.2, as the Flux reference has it)."""
    least, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (most - least)
    return tokens * slope + (low - slope * least)


def set_shifted(scheduler: Any, params: DiffusionParams, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """Set evenly spaced noise levels, or those the request gives, shifted for so many tokens; their timesteps."""
    return set_spaced(scheduler, params, shifted(scheduler.config, tokens), device)


def set_spaced(scheduler: Any, params: DiffusionParams, mu: float, device: torch.device) -> list[torch.Tensor]:
    """Set evenly spaced noise levels, or those the request gives, shifted by `mu`; their timesteps."""
    steps = params.num_inference_steps or 1
    sigmas: Any = params.sigmas if params.sigmas is not None else np.linspace(1.0, 1 / steps, steps)
    if scheduler.config.get("use_flow_sigmas"):  # it spaces them itself
        scheduler.set_timesteps(steps, device=device, mu=mu)
    else:
        scheduler.set_timesteps(sigmas=sigmas, device=device, mu=mu)
    scheduler.set_begin_index(0)
    return after_strength(scheduler, params)


def after_strength(scheduler: Any, params: DiffusionParams) -> list[torch.Tensor]:
    """The timesteps of a scheduler, without those that `strength` leaves out: the request begins with a picture that
    has little noise already."""
    timesteps = list(scheduler.timesteps)
    if params.strength is None:
        return timesteps
    steps = params.num_inference_steps or 1
    skipped = int(max(steps - min(steps * params.strength, steps), 0)) * scheduler.order
    scheduler.set_begin_index(skipped)
    return timesteps[skipped:]
