"""`segue tiny csm`: write a small checkpoint in the published layout, in seconds."""

from __future__ import annotations

from pathlib import Path

from segue.models.family import TinyPreset
from segue.models.shared.checkpoint.pretrained import errors_only, without_bars
from segue.models.shared.library import GenerationConfig
from segue.models.shared.tiny.files import train_tokenizer, write_json, write_tokenizer
from segue.models.shared.tiny.sizes import check_size
from segue.models.speech.csm.tiny.config import IDS, SHAPES, SPECIAL_TOKENS, config_json
from segue.models.speech.csm.tiny.weights import make_model

SIZES = tuple(SHAPES)
_DATA = Path(__file__).parent / "data"
_SHARD = "300KB"
_BEGIN, _END = SPECIAL_TOKENS[:2]


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a CSM checkpoint with random weights; equal size and seed give equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[size]
    with errors_only("transformers.configuration_utils"), without_bars():  # text ids exceed the vocabulary of codes
        model = make_model(config_json(shape), seed)
        model.generation_config = _generation(shape.codebooks)
        model.save_pretrained(directory, max_shard_size=_SHARD)
    write_json(directory, "config.json", config_json(shape))
    _write_tokenizer(directory)
    write_json(
        directory,
        "preprocessor_config.json",
        {
            "chunk_length_s": None,
            "feature_extractor_type": "EncodecFeatureExtractor",
            "feature_size": 1,
            "overlap": None,
            "padding_side": "right",
            "padding_value": 0.0,
            "processor_class": "CsmProcessor",
            "return_attention_mask": True,
            "sampling_rate": 24000,
        },
    )
    write_json(directory, "processor_config.json", {"processor_class": "CsmProcessor"})
    (directory / "chat_template.jinja").write_text((_DATA / "chat_template.jinja").read_text())


def _generation(codebooks: int) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=IDS[_BEGIN],
        do_sample=True,
        max_new_tokens=125,
        pad_token_id=IDS["<|AUDIO|>"],
        temperature=0.9,
        top_k=50,
        depth_decoder_do_sample=True,
        depth_decoder_max_new_tokens=codebooks - 1,
        depth_decoder_min_new_tokens=codebooks - 1,
        depth_decoder_temperature=0.9,
        depth_decoder_top_k=50,
    )


def _write_tokenizer(directory: Path) -> None:
    tokenizer = train_tokenizer(SPECIAL_TOKENS, begin=_BEGIN, end=_END)
    write_tokenizer(
        directory,
        tokenizer,
        SPECIAL_TOKENS,
        _END,
        131072,
        bos_token=_BEGIN,
        eos_token=_END,
        processor_class="CsmProcessor",
    )


PRESETS = {"csm": TinyPreset(SIZES, make)}
