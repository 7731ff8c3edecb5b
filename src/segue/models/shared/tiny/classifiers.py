"""Write small checkpoints of models for sequence classification, in their published format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors

from segue.models.shared.library import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from segue.models.shared.tiny.files import BASE_VOCAB, train_tokenizer, write_tokenizer
from segue.models.shared.tiny.sizes import check_size
from segue.models.shared.tiny.weights import randomise

SIZES = ("tiny",)


@dataclass(frozen=True)
class SmallClassifier:
    """The properties of one family's checkpoint."""

    model_type: str
    special: tuple[str, ...]
    pad: str
    begin: str | None = None
    end: str | None = None
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    """The tokenizer's outputs."""
    shape: Mapping[str, Any] = field(default_factory=dict)


BERT = SmallClassifier(
    "bert",
    special=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    pad="[PAD]",
    begin="[CLS]",
    end="[SEP]",
    inputs=("input_ids", "token_type_ids", "attention_mask"),
    shape={"max_position_embeddings": 512},
)
QWEN3 = SmallClassifier(
    "qwen3",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    pad="<|endoftext|>",
    shape={"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024},
)
_SHAPE: Mapping[str, Any] = {
    "vocab_size": 672,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def make_classifier(
    small: SmallClassifier, labels: Mapping[str, Any], directory: Path, size: str = "tiny", seed: int = 0
) -> None:
    """Write a checkpoint with random weights; equal size and seed give equal files. `labels`: the config's entries
    about labels.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(small.special, begin=small.begin, end=small.end)
    if small.begin is not None:
        tokenizer.post_processor = _joined(tokenizer, small.begin, str(small.end))
    longest, inputs = small.shape["max_position_embeddings"], list(small.inputs)
    write_tokenizer(directory, tokenizer, small.special, small.pad, longest, model_input_names=inputs)
    pad = BASE_VOCAB + small.special.index(small.pad)
    config = AutoConfig.for_model(small.model_type, **{**_SHAPE, **small.shape, **labels}, pad_token_id=pad)
    with torch.random.fork_rng(devices=[]):  # the library first draws weights of its own
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    if model.num_labels > 1:
        _sharpen(model)
    model.save_pretrained(directory)


def _sharpen(model: PreTrainedModel) -> None:
    """Make BERT's first token, which determines the class, take more from the other tokens than from itself: otherwise
    all texts have the same class."""
    gains = {"attention.output.dense.weight": 4.0, "query.weight": 2.0, "key.weight": 2.0, "classifier.weight": 3.0}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for ending, gain in gains.items():
                if name.endswith(ending):
                    weight *= gain


def _joined(tokenizer: Tokenizer, begin: str, end: str) -> processors.PostProcessor:
    """Join two texts as BERT does; the tokens of the second, and its end token, have type 1."""
    around = [(token, tokenizer.token_to_id(token)) for token in (begin, end)]
    template = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B:1 {end}:1", special_tokens=around
    )
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
