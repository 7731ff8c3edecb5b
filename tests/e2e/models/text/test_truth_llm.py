"""Language models through the whole system: what comes out is what transformers gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from truth_system import System, assert_same, spans

from segue.messages.deltas import Delta, Finished, TextDelta
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams
from segue.models.shared.library import AutoModelForCausalLM, AutoTokenizer
from segue.models.text.causal_lm import tiny

QUESTIONS = (
    "Hello",
    "What is the sea?",
    "Tell me a story about three birds and a boat.",
    "Why?",
    "Good morning to you.",
    "Write a list of all the things that one can find on a beach, and say of each what it is good for.",
)
TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)


class Library:
    """transformers on a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def ids(self, text: str, *, raw: bool = False) -> torch.Tensor:
        if raw:
            return self.tokenizer(text, return_tensors="pt")["input_ids"]
        messages = [{"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]

    def answer(self, ids: torch.Tensor) -> list[int]:
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0
        )
        return out[0, ids.shape[1] :].tolist()

    def longest(self) -> str:
        """The question with the longest answer."""
        return max(QUESTIONS, key=lambda text: len(self.answer(self.ids(text))))

    def check(self, output: Any, ids: torch.Tensor) -> None:
        expected = self.answer(ids)
        assert output.token_ids == {"llm": expected}
        assert output.text == self.tokenizer.decode(expected, skip_special_tokens=True)
        assert output.finish_reason == ("length" if len(expected) == TOKENS else "stop")
        assert output.usage.prompt_tokens == ids.shape[1]


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt-oss", marks=pytest.mark.nightly)])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    directory = tmp_path_factory.mktemp(request.param)
    tiny.make(request.param, directory)
    system = System(directory, stages={"llm": {"max_tokens_per_step": 64}})
    yield system, Library(directory)
    system.close()


def question(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "sampling": GREEDY, **more}


def test_all_at_once(running: tuple[System, Library]) -> None:
    system, library = running
    outputs = system.ask(*(question(text) for text in QUESTIONS))
    for output, text in zip(outputs, QUESTIONS, strict=True):
        library.check(output, library.ids(text))
        assert spans(output) == {"input", "llm"}
    assert len({output.text for output in outputs}) == len(QUESTIONS)


def test_a_bare_string_is_a_message_and_a_prompt_is_as_it_is(running: tuple[System, Library]) -> None:
    system, library = running
    text = QUESTIONS[1]
    request = system.omni.request(text)
    assert request.messages[0].role == "user"
    prompt, ids = system.ask(
        {"prompt": text, "sampling": GREEDY},
        {"prompt_token_ids": library.ids(text)[0].tolist(), "sampling": GREEDY},
    )
    library.check(prompt, library.ids(text, raw=True))
    library.check(ids, library.ids(text))


def test_streamed_is_whole(running: tuple[System, Library]) -> None:
    system, library = running
    deltas: list[Delta] = []
    text = library.longest()
    streamed = system.run(system.collect(question(text), deltas.append))
    library.check(streamed, library.ids(text))
    texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
    assert len(texts) > 3
    assert isinstance(deltas[-1], Finished)
    assert "".join(delta.text for delta in texts) == streamed.text
    [whole] = system.ask(question(text))
    assert_same(streamed, whole)


def test_a_killed_worker_changes_nothing(running: tuple[System, Library]) -> None:
    system, library = running
    longest = library.longest()

    async def body() -> int:
        killed: list[Delta] = []

        def kill(delta: Delta) -> None:
            if isinstance(delta, TextDelta) and not killed:  # the first: the reply goes on
                killed.append(delta)
                system.kill("llm")

        others = (system.collect(question(text)) for text in QUESTIONS[:2])
        outputs = await asyncio.gather(system.collect(question(longest), kill), *others)
        assert killed
        for output, text in zip(outputs, [longest, *QUESTIONS[:2]], strict=True):
            library.check(output, library.ids(text))
        return outputs[0].metrics.attempts

    assert system.in_time(body, lambda attempts: attempts > 1) == 2


def test_one_way_to_write_a_prompt(running: tuple[System, Library]) -> None:
    system, _ = running
    for prompt in ({}, {"prompt": "a", "messages": []}, {"prompt": "a", "prompt_token_ids": [1]}):
        with pytest.raises(InvalidRequest, match="one of 'messages', 'prompt', 'prompt_token_ids' and 'prompt_embeds'"):
            system.ask(prompt)


def test_without_a_chat_template_a_bare_string_is_a_prompt(tmp_path: Path) -> None:
    tiny.make("gpt2", tmp_path)
    system, library = System(tmp_path), Library(tmp_path)
    try:
        text = "The small boat left the harbour"
        output = system.run(system.omni.generate(text, sampling=GREEDY))
        library.check(output, library.ids(text, raw=True))
        with pytest.raises(InvalidRequest, match="no chat template; send a prompt"):
            system.ask(question("Hello"))
    finally:
        system.close()


def test_a_deployment_cuts_prompts(tmp_path: Path) -> None:
    """Where a request does not say how far; what its tokens are is told whole."""
    tiny.make("llama", tmp_path)
    library = Library(tmp_path)
    system = System(tmp_path, stages={"llm": {"sampling": {"truncate_prompt_tokens": 7}}})
    try:
        [whole, own] = QUESTIONS[2:4]
        asked = GREEDY.over(SamplingParams(truncate_prompt_tokens=3))
        outputs = system.ask(question(whole), question(own, sampling=asked))
        library.check(outputs[0], library.ids(whole)[:, -7:])
        library.check(outputs[1], library.ids(own)[:, -3:])
        assert system.run(system.omni.tokenize(question(whole))) == library.ids(whole)[0].tolist()
    finally:
        system.close()
