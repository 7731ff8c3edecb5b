"""The input stage of a text embedding model."""

from __future__ import annotations

from segue.engines.contract import LoadContext
from segue.models.registry import read_config
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.decoder.generation import whole_length
from segue.models.shared.text.text_input import TextInput
from segue.models.shared.text.tokenizer import load_tokenizer
from segue.models.text.text_embedding.recipe import read_recipe


class InputProcessor(TextInput):
    """Limits texts to the length that the recipe and the model's positions allow."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError`."""
        config = load_config(ctx)
        own = read_recipe(ctx.model_dir, read_config(ctx.model_dir)).max_length
        longest = whole_length(config, own, "sentence_bert_config.json no max_seq_length", ctx.max_model_len)
        super().__init__(load_tokenizer(ctx.model_dir), config.vocab_size, longest)
