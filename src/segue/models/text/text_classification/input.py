"""The input stage of a classifier."""

from __future__ import annotations

from segue.engines.contract import LoadContext
from segue.models.shared.checkpoint.pretrained import load_config
from segue.models.shared.text.sequence_classifier import longest_row
from segue.models.shared.text.text_input import TextInput
from segue.models.shared.text.tokenizer import load_tokenizer


class InputProcessor(TextInput):
    """Limits texts to the length that the tokenizer and the model's positions allow."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError`."""
        tokenizer = load_tokenizer(ctx.model_dir)
        longest = longest_row(ctx, None if tokenizer is None else tokenizer.model_max_length)
        super().__init__(tokenizer, load_config(ctx).get_text_config().vocab_size, longest)
