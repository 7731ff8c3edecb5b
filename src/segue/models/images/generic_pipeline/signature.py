"""Inspect the arguments of a pipeline class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.images.generic_pipeline.library import DiffusionPipeline
from segue.models.shared.diffusion.library import LIBRARIES, VERSION
from segue.models.shared.diffusion.loading import pipeline_index

OWN = frozenset(
    ("self", "args", "kwargs", "prompt", "generator", "latents", "output_type", "return_dict", "image", "mask_image",
     "last_image", "num_images_per_prompt", "num_videos_per_prompt", "num_inference_steps", "callback",
     "callback_steps", "callback_on_step_end", "callback_on_step_end_tensor_inputs")
)  # fmt: skip
"""Arguments that the stage sets itself, or whose values a request cannot carry."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a pipeline's `__call__`."""

    kind: type[DiffusionPipeline]
    defaults: Mapping[str, Any]
    """By argument; `inspect.Parameter.empty` for required ones."""

    @property
    def free(self) -> frozenset[str]:
        """Arguments that a request may set besides the prompt, images, seed, steps and number of outputs."""
        return frozenset(name for name in self.defaults if name not in OWN and not name.endswith("_embeds"))

    @property
    def settings(self) -> frozenset[str]:
        """Optional arguments of `__init__`."""
        parameters = inspect.signature(self.kind.__init__).parameters.values()
        return frozenset(one.name for one in parameters if one.default is not inspect.Parameter.empty)

    @property
    def plain(self) -> Mapping[str, Any]:
        """Defaults of the arguments that a request may set, if they are plain values."""
        kinds = (bool, int, float, str, list, tuple)
        return {name: self.defaults[name] for name in self.free if isinstance(self.defaults[name], kinds)}

    @property
    def count(self) -> str | None:
        """The argument for the number of outputs."""
        found = [name for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in self.defaults]
        return found[0] if found else None


def signature_of(model_dir: Path) -> Signature:
    """The signature of the pipeline that `model_index.json` names. Raises `ConfigError`."""
    name = pipeline_index(model_dir).get("_class_name")
    kind = getattr(LIBRARIES["diffusers"], str(name), None)  # the library loads its classes on first access
    if not (isinstance(kind, type) and issubclass(kind, DiffusionPipeline)):
        raise ConfigError(f"{model_dir}: diffusers {VERSION} has no pipeline {name!r}", field="model")
    parameters = inspect.signature(kind.__call__).parameters
    if "prompt" not in parameters:
        raise ConfigError(f"{model_dir}: {name} takes no prompt", field="model")
    return Signature(kind, {one.name: one.default for one in parameters.values()})


def field_of(error: Exception, signature: Signature) -> str:
    """The argument that a pipeline's error message mentions first."""
    said = str(error)
    return min((name for name in signature.free if name in said), key=said.index, default="prompt")
