"""What the two kinds of Flux 2 make of a prompt: token ids, filled up to one length, and which of them count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.diffusion.loading import load_processor, load_tokenizer, pipeline_index

KLEIN = "Flux2KleinPipeline"
SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
"""What the published text encoder was told when the denoiser was trained."""
LAYERS = {"Flux2Pipeline": (10, 20, 30), KLEIN: (9, 18, 27)}
"""Of the text encoder, by pipeline: the layers behind which hidden states are taken, all of them side by side."""


class Dev:
    """A conversation of Mistral 3's, by the processor of the checkpoint."""

    def __init__(self, model_dir: Path) -> None:
        self._processor = load_processor(model_dir, "tokenizer")
        if self._processor.chat_template is None:
            raise ConfigError(f"{model_dir / 'tokenizer'}: has no chat template", field="model")

    def item(self, prompt: str, length: int) -> dict[str, Any]:
        """`{"ids": [int, …], "mask": [0 or 1, …]}`, `length` each. A placeholder for a picture is left out."""
        turns = [("system", SYSTEM), ("user", prompt.replace(self._processor.image_token, ""))]
        made = self._processor.apply_chat_template(
            [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns],
            add_generation_prompt=False,
            tokenize=True,
            return_dict=True,
            processor_kwargs={"padding": "max_length", "truncation": True, "max_length": length},
        )
        return {"ids": list(made["input_ids"][0]), "mask": list(made["attention_mask"][0])}


class Klein:
    """A turn of Qwen 3's, without thoughts."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = load_tokenizer(model_dir)
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{model_dir / 'tokenizer'}: has no chat template", field="model")

    def item(self, prompt: str, length: int) -> dict[str, Any]:
        """As of `Dev`."""
        turn = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        made = self._tokenizer(turn, padding="max_length", truncation=True, max_length=length)
        return {"ids": list(made.input_ids), "mask": list(made.attention_mask)}


def prompts_of(model_dir: Path) -> Dev | Klein:
    """Of the checkpoint's kind. Raises `ConfigError`."""
    return Klein(model_dir) if pipeline_index(model_dir).get("_class_name") == KLEIN else Dev(model_dir)
