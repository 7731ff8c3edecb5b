"""The bytes of tokens, for the ways tokenizers write them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from segue.models.shared.text.tokenizer import TokenizerVocabulary, byte_level_table, vocabulary_of

TEXTS = (
    "the sea and the hills behind it",
    "  two spaces,\n\ta tab",
    "Äpfel und Öl, naïve café",
    "海と山 — 🌊🏔️ end",
    "<0x41> is not a byte, nor is ▁ a space",
)


def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS, trainer)
    return wrapped(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama's: a space is `▁`, what is not in the vocabulary falls apart into bytes."""
    pieces = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *"▁theasndil", "th", "▁th", "▁the", "▁a", "se"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "a"), ("s", "e")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return wrapped(tokenizer)


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=["byte level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return request.param()


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_are_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    vocabulary = TokenizerVocabulary(tokenizer)
    ids = vocabulary.encode(text)
    if "▁" in text and "<0x00>" in tokenizer.get_vocab():
        text = text.replace("▁", " ")  # there a written ▁ is a space
    assert b"".join(vocabulary.token_bytes(ids)).decode() == text
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_parts_of_characters_have_their_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = TokenizerVocabulary(tokenizer)
    parts = vocabulary.token_bytes(vocabulary.encode("🙃"))
    assert len(parts) > 1
    assert b"".join(parts) == "🙃".encode()


def test_added_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = TokenizerVocabulary(tokenizer)
    end, tool = tokenizer.convert_tokens_to_ids(["<|end|>", "<tool>"])
    assert vocabulary.token_bytes([end, tool, 10**6]) == [b"", b"<tool>", b""]
    assert [vocabulary.name(token) for token in (end, tool, 10**6)] == ["<|end|>", "<tool>", ""]
    assert vocabulary.encode("a<tool>")[-1] == tool


def test_no_special_tokens_are_put_around_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.eos_token_id not in TokenizerVocabulary(tokenizer).encode("the sea")


def test_the_table_has_every_byte() -> None:
    table = byte_level_table()
    assert sorted(table.values()) == list(range(256))
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    assert table["Ġ"] == ord(" ")


def test_without_a_tokenizer() -> None:
    assert vocabulary_of(None) is None
