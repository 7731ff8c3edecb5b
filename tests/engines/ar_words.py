"""An adapter that writes words, and what drives it: for the tests of structured output."""

from __future__ import annotations

import threading
from typing import Any

from ar_adapter import Driver, TinyAdapter, prompts, stage_request, tiny_model

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.grammar.grammar import Grammars
from segue.messages.sampling import SamplingParams, StructuredOutput

PROMPT = prompts(1, [9])[0]
TEXT = frozenset({"text"})
END = 0
WORDS = ["", *(chr(code) for code in range(32, 127)), "true", '": ', '{"', "ab", "\u00e9"]
"""Printable characters and some longer tokens; id 0 ends the output."""


class Words:
    """The vocabulary of `WORDS`."""

    def token_bytes(self, token_ids) -> list[bytes]:
        return [WORDS[token].encode() if token < len(WORDS) else b"" for token in token_ids]

    def name(self, token_id: int) -> str:
        return "<end>"

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(letter) for letter in text]


class WordAdapter(TinyAdapter):
    """Writes `WORDS`; its vocabulary has rows that no token has."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.vocabulary = Words()
        self.end_token_ids = frozenset({END})

    def decode_text(self, token_ids, *, skip_special_tokens: bool) -> str:
        return "".join(WORDS[token] for token in token_ids if token < len(WORDS))


def word_adapter() -> WordAdapter:
    """Of small weights."""
    return WordAdapter(tiny_model("qwen2", seed=7, vocab_size=110))


def driver(adapter, grammars: Grammars | None = None, **config) -> tuple[Driver, threading.Event]:
    """And the event of a grammar's being there."""
    there = threading.Event()
    made = grammars or Grammars.of(adapter, there.set)
    config = AutoregressiveConfig(**{"num_blocks": 200, "block_size": 8, **config})
    return Driver(AutoregressiveEngine(adapter, config, made)), there


def finish(drive: Driver, there: threading.Event, ids) -> None:
    """Run until all of `ids` are finished; wait for grammars where nothing else can run."""
    while True:
        drive.run()
        left = [name for name in ids if name not in drive.results or not over(drive.results[name])]
        if not left:
            return
        assert there.wait(120)
        there.clear()


def over(result) -> bool:
    return result.last.finished or result.last.error is not None


def write(adapter, form: dict[str, Any], seeds=(1, 2, 3), most=120, **sampling):
    drive, there = driver(adapter)
    asked = StructuredOutput(**form)
    for seed in seeds:
        params = SamplingParams(**{"temperature": 1.0, "max_tokens": most, "structured_outputs": asked, **sampling})
        drive.add(stage_request(f"r{seed}", sampling=params, to_client=TEXT, seed=seed), PROMPT)
    finish(drive, there, [f"r{seed}" for seed in seeds])
    return [drive.results[f"r{seed}"] for seed in seeds]


ASKING = SamplingParams(max_tokens=30, structured_outputs=StructuredOutput(choice=["ab"]))
