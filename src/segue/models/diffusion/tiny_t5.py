"""A small tokenizer of T5's kind, made here."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from segue.models.diffusion.tiny import write_tokenizer
from segue.models.tiny.files import CORPUS

SPECIAL = ("<pad>", "</s>", "<unk>")
"""At ids 0, 1 and 2, as published."""
VOCAB = 512


def write_t5_tokenizer(directory: Path, *, longest: int) -> None:
    """The folder of a `T5Tokenizer`: pieces of words, the end token behind a text. The pieces are those that byte-pair
    encoding finds, the likelier the earlier: the library's trainer for T5's kind gives others in another run."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    spaces = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    pieces.pre_tokenizer = spaces
    pieces.train(
        [str(CORPUS)], trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), show_progress=False)
    )
    ids = pieces.get_vocab()
    scored = [(piece, -0.02 * place if place >= len(SPECIAL) else 0.0) for piece, place in ids.items()]
    scored.sort(key=lambda pair: ids[pair[0]])
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    more = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "extra_ids": 0}
    write_tokenizer(directory, tokenizer, SPECIAL, "T5Tokenizer", longest=longest, **more)
