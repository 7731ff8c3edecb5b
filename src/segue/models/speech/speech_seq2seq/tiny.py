"""`segue tiny whisper`: write a small transcription model in Whisper's published format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from segue.models.family import TinyPreset
from segue.models.shared.library import AutoConfig, AutoModelForSpeechSeq2Seq, GenerationConfig, PreTrainedModel
from segue.models.shared.tiny.files import BASE_VOCAB, added_tokens, train_tokenizer, write_json
from segue.models.shared.tiny.sizes import check_size
from segue.models.shared.tiny.weights import randomise

SIZES = ("tiny",)
LANGUAGES = ("en", "zh", "de", "es", "fr")
_TASKS = ("translate", "transcribe")
_SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)),
    *(*(f"<|{task}|>" for task in _TASKS), "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
"""In the order of their ids, from `BASE_VOCAB` on; the timestamps follow."""
_TIMES = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1501))
_LONGEST = 96
"""Number of the decoder's positions; the published models have 448."""
_GAINS = (
    # makes the audio determine the text
    (r"decoder.*encoder_attn\.(out|v)_proj\.weight$", 1.6),
    (r"decoder.*fc\d\.weight$", 2.0),
    # sharp logits, although embeddings are so small that a token does not repeat itself
    (r"decoder\.layer_norm\.weight$", 4.0),
    (r"decoder\.embed_positions\.weight$", 1.0),
    (r"encoder\.embed_positions\.weight$", 0.5),
    (r"encoder\.conv\d\.weight$", 0.5),
)


def make(directory: Path, size: str = "tiny", seed: int = 0) -> None:
    """Write a checkpoint with random weights; equal seeds give equal files. Raises `InvalidRequest` for an unknown
    size."""
    check_size(size, SIZES)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(_SPECIAL)
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in _TIMES])
    ids = {token: BASE_VOCAB + place for place, token in enumerate(_SPECIAL)}
    _write_files(directory, tokenizer)
    config = AutoConfig.for_model(
        "whisper",
        vocab_size=BASE_VOCAB + len(_SPECIAL) + len(_TIMES),
        num_mel_bins=80,
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=1500,
        max_target_positions=_LONGEST,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
    )
    with torch.random.fork_rng(devices=[]):  # the library first draws weights of its own
        model = AutoModelForSpeechSeq2Seq.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed, embedding_std=0.2)
    _scale(model, ids)
    model.generation_config = _generation(ids)
    model.save_pretrained(directory)


def _scale(model: PreTrainedModel, ids: dict[str, int]) -> None:
    """Scale weights so that texts end by themselves and contain timestamps."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for pattern, gain in _GAINS:
                if re.search(pattern, name):
                    parameter.mul_(gain)
        rows = model.get_input_embeddings().weight
        rows[BASE_VOCAB:] *= 0.7
        rows[ids["<|endoftext|>"]] *= 2.5
        # subtract the mean of the hidden states, so that no word is the likeliest everywhere
        generator = torch.Generator().manual_seed(0)
        encoder_states = model.get_encoder()(torch.randn(4, 80, 3000, generator=generator)).last_hidden_state
        some = torch.randint(0, BASE_VOCAB, (4, _LONGEST), generator=generator)
        decoder = model.get_decoder()
        hidden = decoder(input_ids=some, encoder_hidden_states=encoder_states, use_cache=False).last_hidden_state
        decoder.layer_norm.bias -= hidden.mean((0, 1))


def _generation(ids: dict[str, int]) -> GenerationConfig:
    return GenerationConfig(
        begin_suppress_tokens=[220, ids["<|endoftext|>"]],
        bos_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        eos_token_id=ids["<|endoftext|>"],
        forced_decoder_ids=[[1, None], [2, ids["<|transcribe|>"]]],
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        max_initial_timestamp_index=50,
        max_length=_LONGEST,
        no_timestamps_token_id=ids["<|notimestamps|>"],
        pad_token_id=ids["<|endoftext|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        return_timestamps=False,
        suppress_tokens=[1, 2, 7, 8, 9, *(ids[name] for name in ("<|startoftranscript|>", *_SPECIAL[-6:-1]))],
        task_to_id={task: ids[f"<|{task}|>"] for task in _TASKS},
    )


def _write_files(directory: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    end = "<|endoftext|>"
    times: dict[str, Any] = {
        str(tokenizer.token_to_id(time)): {
            "content": time,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": False,
        }
        for time in _TIMES
    }
    write_json(
        directory,
        "tokenizer_config.json",
        {
            "added_tokens_decoder": {**added_tokens(tokenizer, _SPECIAL), **times},
            "additional_special_tokens": list(_SPECIAL),
            "bos_token": end,
            "clean_up_tokenization_spaces": False,
            "eos_token": end,
            "errors": "replace",
            "model_max_length": 1024,
            "pad_token": end,
            "processor_class": "WhisperProcessor",
            "return_attention_mask": False,
            "tokenizer_class": "WhisperTokenizer",
            "unk_token": end,
        },
    )
    write_json(
        directory,
        "preprocessor_config.json",
        {
            "chunk_length": 30,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 80,
            "hop_length": 160,
            "n_fft": 400,
            "n_samples": 480000,
            "nb_max_frames": 3000,
            "padding_side": "right",
            "padding_value": 0.0,
            "processor_class": "WhisperProcessor",
            "return_attention_mask": False,
            "sampling_rate": 16000,
        },
    )


PRESETS = {"whisper": TinyPreset(SIZES, make)}
