"""Run a pipeline's own argument checks before it starts, on a copy without weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.images.generic_pipeline.library import ChecksInputs
from segue.models.images.generic_pipeline.signature import Signature, field_of
from segue.models.shared.diffusion.library import ModelMixin
from segue.models.shared.diffusion.loading import UNREADABLE, build, component_class, pipeline_index


class OwnChecks:
    """Runs `check_inputs` of a pipeline whose blocks have none. Its networks are on the meta device; other parts are
    omitted."""

    def __init__(self, model_dir: Path, signature: Signature) -> None:
        """Raises `ConfigError`."""
        self._signature = signature
        index = pipeline_index(model_dir)
        parts: dict[str, Any] = {}
        try:
            for name in list(inspect.signature(signature.kind.__init__).parameters)[1:]:
                value = index.get(name)
                if isinstance(value, list) and len(value) == 2 and isinstance(value[1], str):
                    kind = component_class(model_dir, name)
                    with torch.device("meta"):
                        parts[name] = build(kind, model_dir / name) if issubclass(kind, ModelMixin) else None
                elif value is not None or name not in signature.settings:
                    parts[name] = None if isinstance(value, list) else value
            pipeline = signature.kind(**parts)
        except UNREADABLE as error:
            raise ConfigError(f"{model_dir}: the pipeline cannot be made: {error}", field="model") from error
        self._pipeline = pipeline if isinstance(pipeline, ChecksInputs) else None

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` with the argument's name."""
        if self._pipeline is None:
            return
        given = {
            name: arguments.get(name)
            for name, one in inspect.signature(self._pipeline.check_inputs).parameters.items()
            if name in arguments or one.default is inspect.Parameter.empty
        }
        try:
            self._pipeline.check_inputs(**given)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(
                f"the pipeline refuses the request: {error}", field=field_of(error, self._signature)
            ) from error
