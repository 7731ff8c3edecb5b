"""Load an author's model by his own classes."""

from __future__ import annotations

from typing import Any

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.shared.checkpoint.pretrained import load_model
from segue.models.shared.library import PreTrainedModel


def load_author(ctx: LoadContext, kind: type[PreTrainedModel]) -> Any:
    """The checkpoint as the author's model class: by its `config_class` and its `from_pretrained`, so under his own
    names of weights. Every tensor must be there. Raises `ConfigError`."""
    if kind.config_class is None:
        raise ConfigError(f"{kind.__name__} has no config_class", field="model")
    try:
        config = kind.config_class.from_pretrained(ctx.model_dir)
    # the config is the author's class, which may raise anything for values that it does not expect
    except Exception as error:
        raise ConfigError(f"{ctx.model_dir / 'config.json'}: {error}", field="model") from error
    return load_model(ctx, config, kind)
