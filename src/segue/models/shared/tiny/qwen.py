"""Write the tokenizer of a small Qwen checkpoint with its roles and special tokens, in the published files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from segue.models.shared.tiny.files import added_tokens, train_tokenizer, write_json


def write_qwen_tokenizer(
    directory: Path,
    special: Sequence[str],
    roles: Sequence[str],
    *,
    texts: Iterable[str] | None = None,
    **more: Any,
) -> Tokenizer:
    """Write and return a tokenizer. `special`: its special tokens, padding first; `roles`: words of one token each, as
    published; `texts`: what it is trained on (default: a page of text); `more`: keys of its `tokenizer_config.json`."""
    tokenizer = train_tokenizer(special, texts=texts)
    tokenizer.add_tokens([AddedToken(role, single_word=True, normalized=False) for role in roles])
    tokenizer.save(str(directory / "tokenizer.json"))
    base = json.loads(tokenizer.to_str())["model"]
    write_json(directory, "vocab.json", base["vocab"])
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in base["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    words = added_tokens(tokenizer, roles)
    for flags in words.values():
        flags |= {"single_word": True, "special": False}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {**added_tokens(tokenizer, special), **words},
        "additional_special_tokens": list(special[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": special[0],
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        **more,
    }
    write_json(directory, "tokenizer_config.json", config)
    marks = {"additional_special_tokens": list(special[1:]), "eos_token": "<|im_end|>"}
    write_json(directory, "special_tokens_map.json", {**marks, "pad_token": special[0]})
    return tokenizer
