"""Create diffusers' schedulers: a new one per sample, of the checkpoint's class or of one that the request names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import ConfigError, InvalidRequest, nearest, shown
from segue.models.shared.diffusion.library import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    LCMScheduler,
    SchedulerMixin,
    UniPCMultistepScheduler,
)
from segue.models.shared.diffusion.loading import component_class

_NOT_MADE = (TypeError, ValueError, NotImplementedError, ImportError)
"""Exceptions of schedulers for invalid settings; some need a package (`use_beta_sigmas`: SciPy)."""
_BETAS = {"beta_start", "beta_end", "beta_schedule"}
"""Settings of every scheduler that adds noise by a table of variances."""


class Schedulers:
    """The schedulers that can sample a checkpoint."""

    def __init__(self, model_dir: Path, name: str = "scheduler", *, across: bool = False) -> None:
        """`name`: the part of the pipeline; `across`: for a flow, also offer schedulers whose settings have other
        names. Raises `ConfigError`."""
        kind = component_class(model_dir, name)
        self.config: dict[str, Any] = dict(kind.load_config(model_dir / name, local_files_only=True))
        self._default = kind
        try:
            compatible = kind.from_config(self.config).compatibles
        except _NOT_MADE as error:
            raise ConfigError(
                f"{model_dir / name}: {kind.__name__} cannot be created from its settings: {error}", field="model"
            ) from error
        if self.config.get("scale_factors"):
            raise ConfigError(
                f"{model_dir / name}: scale_factors is {self.config['scale_factors']}; latents that grow between steps "
                "(scale-wise generation) are not served",
                field="model",
            )
        # for adapters distilled to few steps; diffusers does not list it as compatible with any
        if self.config.keys() >= _BETAS:
            compatible = [*compatible, LCMScheduler]
        # diffusers has a placeholder class for a scheduler whose package is missing
        self._kinds = {
            one.__name__: one
            for one in (kind, *compatible)
            if issubclass(one, SchedulerMixin) and (one is kind or self._serves(one))
        }
        self._settings: dict[str, dict[str, Any]] = {}
        """By name: settings of a scheduler that override the checkpoint's."""
        for one, settings in _across(kind, self.config) if across else ():
            self._kinds[one.__name__], self._settings[one.__name__] = one, settings
        self.known: tuple[str, ...] = tuple(sorted(self._kinds))

    def _serves(self, kind: type[SchedulerMixin]) -> bool:
        """Whether a scheduler that diffusers lists as compatible can sample this checkpoint. Not all can integrate a
        flow's velocities, or have a table of variances: EDM's needs noise levels that such a checkpoint does not
        state."""
        taken = inspect.signature(kind).parameters.keys()
        if self.config.get("prediction_type") == "flow_prediction" and "use_flow_sigmas" not in taken:
            return False
        return taken >= _BETAS or not self.config.keys() >= _BETAS

    def check(self, name: str | None, sigmas: list[float] | None = None) -> None:
        """Raise `InvalidRequest` for a scheduler that is incompatible with the checkpoint, or cannot be created from
        its settings, and for noise levels that it does not accept."""
        made = self.make(name)
        if sigmas is not None and (made.config.get("use_flow_sigmas") or not takes_sigmas(made)):
            raise InvalidRequest(
                f"sigmas is set, but {type(made).__name__} computes the noise levels itself: leave it out",
                field="sigmas",
            )

    def make(self, name: str | None = None) -> Any:
        """A new scheduler with the checkpoint's settings, without timesteps. Raises `InvalidRequest`."""
        if name is None:
            return self._default.from_config(self.config)
        if name not in self._kinds:
            raise InvalidRequest(
                f"scheduler is {shown(name)}, which cannot sample this model; known: {', '.join(self.known)}"
                f"{_meant(name, self.known)}",
                field="scheduler",
            )
        try:
            return self._kinds[name].from_config(self.config, **self._settings.get(name, {}))
        except _NOT_MADE as error:
            raise InvalidRequest(
                f"scheduler is {shown(name)}, which cannot be created from this model's settings: {error}",
                field="scheduler",
            ) from error


def _across(
    kind: type[SchedulerMixin], config: Mapping[str, Any]
) -> Iterator[tuple[type[SchedulerMixin], dict[str, Any]]]:
    """Schedulers that can integrate the checkpoint's flow but that diffusers does not list as compatible, because they
    name the same settings differently."""
    if issubclass(kind, FlowMatchEulerDiscreteScheduler):
        if config.get("use_dynamic_shifting") and config.get("time_shift_type", "exponential") != "exponential":
            yield FlowMatchLCMScheduler, {}
            return  # the other schedulers support only the exponential shift
        options = {
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
            "flow_shift": config.get("shift", 1.0),
        }
        yield UniPCMultistepScheduler, options
        yield DPMSolverMultistepScheduler, options
        yield FlowMatchLCMScheduler, {}
        if not config.get("use_dynamic_shifting"):  # Heun's does not support dynamic shifting
            yield FlowMatchHeunDiscreteScheduler, {}
    elif config.get("use_flow_sigmas"):
        for one in (FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, FlowMatchLCMScheduler):
            yield one, {"shift": config.get("flow_shift", 1.0)}


def takes_sigmas(scheduler: Any) -> bool:
    """Whether the caller may set its noise levels."""
    return "sigmas" in inspect.signature(scheduler.set_timesteps).parameters


def _meant(name: str, known: tuple[str, ...]) -> str:
    hint = nearest(name, known)
    return hint if hint.startswith("; did you mean") else ""


def shifted(config: Mapping[str, Any], tokens: int) -> float:
    """`mu` of a flow-matching scheduler for an image of `tokens` tokens: linear between its base and its largest size
    (Esser et al. 2024, section 5.3.2, as in the Flux reference)."""
    least, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (high - low) / (most - least)
    return tokens * slope + (low - slope * least)


def set_shifted(
    scheduler: Any, params: DiffusionParams, tokens: int, device: torch.device, *, always: bool = False
) -> list[torch.Tensor]:
    """Set evenly spaced noise levels, or the request's, shifted for `tokens` tokens; returns their timesteps. `always`:
    as in `set_spaced`."""
    return set_spaced(scheduler, params, shifted(scheduler.config, tokens), device, always=always)


def set_spaced(
    scheduler: Any, params: DiffusionParams, mu: float, device: torch.device, *, always: bool = False
) -> list[torch.Tensor]:
    """Set evenly spaced noise levels, or the request's, shifted by `mu`; returns their timesteps. `always`: also for a
    scheduler that computes its own levels but accepts others, as some pipelines do."""
    steps = params.num_inference_steps or 1
    sigmas: Any = params.sigmas if params.sigmas is not None else np.linspace(1.0, 1 / steps, steps)
    spaces_itself = scheduler.config.get("use_flow_sigmas")
    shifts = {} if spaces_itself and not scheduler.config.get("use_dynamic_shifting") else {"mu": mu}
    takes_any = takes_sigmas(scheduler)
    if not (spaces_itself or takes_any):
        raise InvalidRequest(
            f"scheduler is {type(scheduler).__name__}, which accepts no noise levels; this model sets them",
            field="scheduler",
        )
    if spaces_itself and not (always and takes_any):
        scheduler.set_timesteps(steps, device=device, **shifts)
    else:
        scheduler.set_timesteps(sigmas=sigmas, device=device, **shifts)
    scheduler.set_begin_index(0)
    return after_strength(scheduler, params)


def after_strength(scheduler: Any, params: DiffusionParams) -> list[torch.Tensor]:
    """The scheduler's timesteps after those that `strength` skips: the input image already has little noise."""
    timesteps = list(scheduler.timesteps)
    if params.strength is None:
        return timesteps
    steps = params.num_inference_steps or 1
    skipped = int(max(steps - min(steps * params.strength, steps), 0)) * scheduler.order
    scheduler.set_begin_index(skipped)
    return timesteps[skipped:]
