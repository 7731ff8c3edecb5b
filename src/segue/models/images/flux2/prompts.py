"""Tokenize prompts for the two kinds of Flux 2: token ids padded to one length, and their mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.messages.errors import ConfigError
from segue.models.shared.diffusion.loading import load_processor, load_tokenizer, pipeline_index

KLEIN = "Flux2KleinPipeline"
SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
"""The system prompt of the published text encoder, with which the denoiser was trained."""
LAYERS = {"Flux2Pipeline": (10, 20, 30), KLEIN: (9, 18, 27)}
"""By pipeline: the text encoder layers whose output hidden states are concatenated."""


class Dev:
    """A conversation in Mistral 3's format, rendered by the checkpoint's processor."""

    def __init__(self, model_dir: Path) -> None:
        self._processor = load_processor(model_dir, "tokenizer")
        if self._processor.chat_template is None:
            raise ConfigError(f"{model_dir / 'tokenizer'}: has no chat template", field="model")

    def item(self, prompt: str, length: int) -> dict[str, Any]:
        """`{"ids": [int, …], "mask": [0 or 1, …]}`, `length` each. Image placeholders are removed."""
        turns = [("system", SYSTEM), ("user", prompt.replace(self._processor.image_token, ""))]
        made = self._processor.apply_chat_template(
            [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns],
            add_generation_prompt=False,
            tokenize=True,
            return_dict=True,
            return_tensors="np",
            processor_kwargs={"padding": "max_length", "truncation": True, "max_length": length},
        )
        return {"ids": made["input_ids"][0].tolist(), "mask": made["attention_mask"][0].tolist()}


class Klein:
    """A turn in Qwen 3's format, without thinking."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = load_tokenizer(model_dir)
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{model_dir / 'tokenizer'}: has no chat template", field="model")

    def item(self, prompt: str, length: int) -> dict[str, Any]:
        """Same format as `Dev.item`."""
        turn = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        made = self._tokenizer(turn, padding="max_length", truncation=True, max_length=length)
        return {"ids": list(made.input_ids), "mask": list(made.attention_mask)}


def prompts_of(model_dir: Path) -> Dev | Klein:
    """The tokenizer for the checkpoint's pipeline. Raises `ConfigError`."""
    return Klein(model_dir) if pipeline_index(model_dir).get("_class_name") == KLEIN else Dev(model_dir)
