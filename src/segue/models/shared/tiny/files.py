"""Write the files of a small checkpoint: JSON in the published format, and a tokenizer trained on a page of text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = Path(__file__).parent / "data" / "corpus.txt"
BASE_VOCAB = 640
"""Byte-level BPE tokens; special tokens follow."""
# the pattern by which GPT-4's, Llama 3's and Qwen's tokenizers split text before merging bytes
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_json(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def train_tokenizer(
    special_tokens: Sequence[str],
    *,
    begin: str | None = None,
    end: str | None = None,
    texts: Iterable[str] | None = None,
) -> Tokenizer:
    """A byte-level BPE tokenizer; the special tokens have the ids from `BASE_VOCAB` on. `begin`, `end`: special tokens
    that it puts before and after a text. `texts`: what it is trained on, by default the page in `CORPUS`.

    Raises `RuntimeError` where the texts give fewer tokens than `BASE_VOCAB`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCAB, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    if texts is None:
        tokenizer.train([str(CORPUS)], trainer)
    else:
        tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != BASE_VOCAB:
        raise RuntimeError(f"the texts give {tokenizer.get_vocab_size()} tokens, not {BASE_VOCAB}")
    tokenizer.add_special_tokens(list(special_tokens))
    as_bytes = processors.ByteLevel(trim_offsets=False)
    around = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token is not None]
    if around:
        single = " ".join(filter(None, (begin, "$A", end)))
        pair = " ".join(filter(None, (begin, "$A", end, begin, "$B", end)))
        template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=around)
        tokenizer.post_processor = processors.Sequence([as_bytes, template])
    else:
        tokenizer.post_processor = as_bytes
    return tokenizer


def added_tokens(tokenizer: Tokenizer, special_tokens: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`added_tokens_decoder` of a `tokenizer_config.json`."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {str(tokenizer.token_to_id(token)): {"content": token, **flags} for token in special_tokens}


def write_tokenizer(
    directory: Path, tokenizer: Tokenizer, special_tokens: Sequence[str], pad: str, longest: int, **more: Any
) -> None:
    """Write the files of a tokenizer without a chat template. `more`: keys of its `tokenizer_config.json`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {
        "added_tokens_decoder": added_tokens(tokenizer, special_tokens),
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "pad_token": pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **more,
    }
    write_json(directory, "tokenizer_config.json", values)


def speakable(tokenizer: Tokenizer) -> list[int]:
    """Ids of whole printable text, so that replies are readable."""
    texts = ((index, tokenizer.decode([index])) for index in range(BASE_VOCAB))
    return [index for index, text in texts if text.strip() and text.isascii() and text.isprintable()]
