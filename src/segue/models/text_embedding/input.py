"""The input stage of a model of embeddings."""

from __future__ import annotations

from segue.engines.contract import LoadContext
from segue.messages.errors import ConfigError
from segue.models.pretrained import load_config
from segue.models.registry import read_config
from segue.models.text_batches import positions
from segue.models.text_embedding.recipe import read_recipe
from segue.models.text_input import TextInput
from segue.models.tokenizer import load_tokenizer


class InputProcessor(TextInput):
    """Texts as long as the recipe and the model's positions allow."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError`."""
        config = load_config(ctx)
        longest = positions(config)
        if (own := read_recipe(ctx.model_dir, read_config(ctx.model_dir)).max_length) is not None:
            longest = min(longest, own)
        if ctx.max_model_len is not None and ctx.max_model_len > longest:
            raise ConfigError(
                f"max_model_len is {ctx.max_model_len}; this model takes up to {longest} tokens", field="max_model_len"
            )
        super().__init__(load_tokenizer(ctx.model_dir), config.vocab_size, ctx.max_model_len or longest)
