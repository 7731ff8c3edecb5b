"""`segue tiny higgs-audio-v2`: write a small checkpoint in the published layout, in seconds."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from segue.models.family import TinyPreset
from segue.models.shared.checkpoint.pretrained import errors_only, without_bars
from segue.models.shared.tiny.files import train_tokenizer, write_json, write_tokenizer
from segue.models.shared.tiny.sizes import check_size
from segue.models.speech.higgs_audio_v2.loading import CODEC
from segue.models.speech.higgs_audio_v2.tiny.config import IDS, SHAPES, SPECIAL_TOKENS, codec_json, config_json
from segue.models.speech.higgs_audio_v2.tiny.weights import make_codec, make_model

SIZES = tuple(SHAPES)
_DATA = Path(__file__).parent / "data"
_SHARD = "300KB"


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a Higgs Audio v2 checkpoint with random weights, and the decoder of its codec; equal size and seed give
    equal files.

    Raises `InvalidRequest` for an unknown size.
    """
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[size]
    with errors_only("transformers.configuration_utils"), without_bars():
        make_model(config_json(shape), seed).save_pretrained(directory, max_shard_size=_SHARD)
    write_json(directory, "config.json", config_json(shape))
    write_json(
        directory,
        "generation_config.json",
        {
            "bos_token_id": IDS["<|begin_of_text|>"],
            "do_sample": True,
            "eos_token_id": IDS["<|eot_id|>"],
            "max_new_tokens": 250,
            "pad_token_id": IDS["<|end_of_text|>"],
            "ras_win_len": 7,
            "ras_win_max_num_repeat": 2,
            "temperature": 1.0,
            "top_k": 50,
            "top_p": 0.95,
        },
    )
    write_tokenizer(
        directory,
        train_tokenizer(SPECIAL_TOKENS, begin="<|begin_of_text|>"),
        SPECIAL_TOKENS,
        "<|end_of_text|>",
        131072,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        processor_class="HiggsAudioV2Processor",
    )
    write_json(
        directory,
        "processor_config.json",
        {
            "audio_bos_token": "<|audio_out_bos|>",
            "audio_delay_token": "<|reserved_special_token_6|>",
            "audio_eos_token": "<|audio_eos|>",
            "audio_stream_bos_id": 2**shape.code_bits,
            "audio_stream_eos_id": 2**shape.code_bits + 1,
            "audio_token": "<|AUDIO_OUT|>",
            "audio_tokenizer": {
                "audio_tokenizer_class": "HiggsAudioV2TokenizerModel",
                "audio_tokenizer_name_or_path": "bosonai/higgs-audio-v2-tokenizer",
            },
            "processor_class": "HiggsAudioV2Processor",
        },
    )
    (directory / "chat_template.jinja").write_text((_DATA / "chat_template.jinja").read_text())
    codec = directory / CODEC
    codec.mkdir(exist_ok=True)
    write_json(codec, "config.json", codec_json(shape))
    weights = {name: tensor.contiguous() for name, tensor in make_codec(codec_json(shape), seed).state_dict().items()}
    save_file(weights, codec / "model.safetensors", metadata={"format": "pt"})


PRESETS = {"higgs-audio-v2": TinyPreset(SIZES, make)}
