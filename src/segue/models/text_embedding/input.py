"""The input stage of a model of embeddings."""

from __future__ import annotations

from segue.engines.contract import LoadContext
from segue.models.context_length import whole_length
from segue.models.pretrained import load_config
from segue.models.registry import read_config
from segue.models.text_embedding.recipe import read_recipe
from segue.models.text_input import TextInput
from segue.models.tokenizer import load_tokenizer


class InputProcessor(TextInput):
    """Texts as long as the recipe and the model's positions allow."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError`."""
        config = load_config(ctx)
        own = read_recipe(ctx.model_dir, read_config(ctx.model_dir)).max_length
        longest = whole_length(config, own, "sentence_bert_config.json no max_seq_length", ctx.max_model_len)
        super().__init__(load_tokenizer(ctx.model_dir), config.vocab_size, longest)
