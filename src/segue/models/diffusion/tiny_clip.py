"""Making small text encoders of CLIP: the tokenizer as published, in two files, and the network."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import CLIPTokenizer

from segue.models.diffusion.library import LIBRARIES, AutoConfig
from segue.models.diffusion.tiny import randomise
from segue.models.tiny.files import CORPUS, write_json

BEGIN, END = "<|startoftext|>", "<|endoftext|>"
LONGEST = 77
MERGES = 160
_WORD_END = "</w>"


def write_clip_tokenizer(directory: Path, *, pad: str = END) -> dict[str, int]:
    """The folder of a `CLIPTokenizer`; gives its vocabulary. `pad`: what fills up a prompt."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab, merges = _learn()
    (directory / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False) + "\n")
    (directory / "merges.txt").write_text("\n".join(("#version: 0.2", *merges)) + "\n")
    special = {"bos_token": BEGIN, "eos_token": END, "pad_token": pad, "unk_token": END}
    write_json(directory, "special_tokens_map.json", special)
    config = {"model_max_length": LONGEST, "do_lower_case": True, "tokenizer_class": "CLIPTokenizer", **special}
    write_json(directory, "tokenizer_config.json", config)
    return vocab


def make_clip(directory: Path, kind: str, vocab: dict[str, int], seed: int, **sizes: Any) -> Any:
    """A text encoder of the class `kind` of transformers, written; `sizes`: of its config."""
    config = AutoConfig.for_model(
        "clip_text_model",
        **{
            "vocab_size": len(vocab),
            "bos_token_id": vocab[BEGIN],
            "eos_token_id": vocab[END],
            "pad_token_id": vocab[END],
            "max_position_embeddings": LONGEST,
            **sizes,
        },
    )
    network = getattr(LIBRARIES["transformers"], kind)(config).eval()
    randomise(network, seed, {r"\.[qk]_proj\.": 1.3, r"\.out_proj\.": 2.0, "position_embedding": 0.3})
    network.save_pretrained(directory)
    return network


def _learn() -> tuple[dict[str, int], list[str]]:
    """Vocabulary, in the published order (bytes, bytes that end a word, merges, special tokens), and merges.

    Byte pairs by how often they stand beside each other (Sennrich et al. 2016, section 3.2); of equal ones the first in
    the alphabet, since the trainer of `tokenizers` takes one and another where words have an end.
    """
    blank = CLIPTokenizer().backend_tokenizer
    assert blank.normalizer is not None
    assert blank.pre_tokenizer is not None
    found = blank.pre_tokenizer.pre_tokenize_str(blank.normalizer.normalize_str(CORPUS.read_text()))
    words = {word: (*word[:-1], word[-1] + _WORD_END) for word, _ in found}
    counts = Counter(word for word, _ in found)
    learnt: list[tuple[str, str]] = []
    for _ in range(MERGES):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in words.items():
            for pair in pairwise(pieces):
                pairs[pair] += counts[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learnt.append(best)
        words = {word: _merged(pieces, best) for word, pieces in words.items()}
    letters = _bytes()
    entries = [*letters, *(letter + _WORD_END for letter in letters), *("".join(pair) for pair in learnt), BEGIN, END]
    return {entry: index for index, entry in enumerate(dict.fromkeys(entries))}, [" ".join(pair) for pair in learnt]


def _merged(pieces: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    made: list[str] = []
    for piece in pieces:
        if made and (made[-1], piece) == pair:
            made[-1] += piece
        else:
            made.append(piece)
    return tuple(made)


def _bytes() -> list[str]:
    """The letters that byte-level BPE writes for the 256 bytes, those that can be printed first."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]
