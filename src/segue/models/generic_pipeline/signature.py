"""What a pipeline's class takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.diffusion.library import LIBRARIES, VERSION
from segue.models.diffusion.loading import pipeline_index
from segue.models.generic_pipeline.library import DiffusionPipeline

OWN = frozenset(
    ("self", "args", "kwargs", "prompt", "generator", "latents", "output_type", "return_dict", "image", "mask_image",
     "last_image", "num_images_per_prompt", "num_videos_per_prompt", "num_inference_steps", "callback",
     "callback_steps", "callback_on_step_end", "callback_on_step_end_tensor_inputs")
)  # fmt: skip
"""Arguments that the stage gives itself, or that are no value a request could carry."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Of `__call__`."""

    kind: type[DiffusionPipeline]
    defaults: Mapping[str, Any]
    """By argument; of those that must be given, `inspect.Parameter.empty`."""

    @property
    def free(self) -> frozenset[str]:
        """What a request may give besides the prompt, pictures, seed, steps and number of outputs."""
        return frozenset(name for name in self.defaults if name not in OWN and not name.endswith("_embeds"))

    @property
    def settings(self) -> frozenset[str]:
        """Arguments of `__init__` that need not be given."""
        parameters = inspect.signature(self.kind.__init__).parameters.values()
        return frozenset(one.name for one in parameters if one.default is not inspect.Parameter.empty)

    @property
    def plain(self) -> Mapping[str, Any]:
        """Defaults of what a request may give, as far as they are plain values."""
        kinds = (bool, int, float, str, list, tuple)
        return {name: self.defaults[name] for name in self.free if isinstance(self.defaults[name], kinds)}

    @property
    def count(self) -> str | None:
        """The argument that says how many outputs there are."""
        found = [name for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in self.defaults]
        return found[0] if found else None


def signature_of(model_dir: Path) -> Signature:
    """Of the pipeline that `model_index.json` names. Raises `ConfigError`."""
    name = pipeline_index(model_dir).get("_class_name")
    kind = getattr(LIBRARIES["diffusers"], str(name), None)  # it loads its classes when they are asked for
    if not (isinstance(kind, type) and issubclass(kind, DiffusionPipeline)):
        raise ConfigError(f"{model_dir}: diffusers {VERSION} has no pipeline {name!r}", field="model")
    parameters = inspect.signature(kind.__call__).parameters
    if "prompt" not in parameters:
        raise ConfigError(f"{model_dir}: {name} takes no prompt", field="model")
    return Signature(kind, {one.name: one.default for one in parameters.values()})


def field_of(error: Exception, signature: Signature) -> str:
    """The argument that an error of the pipeline speaks of first."""
    said = str(error)
    return min((name for name in signature.free if name in said), key=said.index, default="prompt")
