"""A language model's input, appended while it runs, gives the library's answer to all of it: with a LoRA adapter, and
when the worker is killed while it holds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from truth_system import System, library_answers

from lora_files import make_adapter, merge
from segue.messages.deltas import Delta, Finished, TextDelta, TurnEnded
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams
from segue.models.text.causal_lm import tiny
from segue.orchestrator.requests.open_request import OpenRequest

TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
FIRST, SECOND = list(range(30, 90, 3)), [611, 7, 300, 41]


class Files:
    """A checkpoint, an adapter, and what transformers gives with and without it, turn by turn."""

    def __init__(self, directory: Path) -> None:
        self.base = directory / "base"
        tiny.make("qwen2", self.base)
        self.adapter = make_adapter(self.base, directory / "adapter", ("q_proj", "v_proj"), rank=4, seed=0)
        merged = merge(self.base, self.adapter, directory / "merged")
        self.turns = {name: self._turns(where) for name, where in ((None, self.base), ("adapter", merged))}
        assert self.turns[None] != self.turns["adapter"]

    @staticmethod
    def _turns(directory: Path) -> tuple[list[int], list[int]]:
        [first] = library_answers(directory, [FIRST], TOKENS, eos_token_id=None)
        [second] = library_answers(directory, [[*FIRST, *first, *SECOND]], TOKENS, eos_token_id=None)
        return first, second


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("open"))


@pytest.fixture(scope="module")
def system(files: Files) -> Iterator[System]:
    stage = {"lora": {"adapters": {"adapter": str(files.adapter)}}, "max_tokens_per_step": 8, "block_size": 8}
    system = System(files.base, stages={"llm": stage})
    yield system
    system.close()


def begun(system: System, adapter: str | None = None) -> OpenRequest:
    return system.omni.open(system.omni.request({"prompt_token_ids": FIRST[:7]}, sampling=GREEDY, adapter=adapter))


def told(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas if isinstance(delta, TextDelta) for token in delta.token_ids]


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("adapter", [None, "adapter"])
def test_turns_are_the_library_s(system: System, files: Files, adapter: str | None, killed: bool) -> None:
    async def body() -> None:
        async with begun(system, adapter) as request:
            await request.append(FIRST[7:8])
            await request.append(FIRST[8:], reply=True)
            deltas = [delta async for delta in request.turn()]
            assert deltas.pop() == TurnEnded("llm", "length")
            assert told(deltas) == files.turns[adapter][0]
            if killed:
                [replica] = system.omni.health().stages["llm"].replicas
                assert replica.pid is not None
                os.kill(replica.pid, signal.SIGKILL)
            await request.append(SECOND[:1])
            await request.append(SECOND[1:])
            await request.close()
            *deltas, end = [delta async for delta in request]
            assert isinstance(end, Finished)
            assert end.token_ids == {"llm": [*files.turns[adapter][0], *files.turns[adapter][1]]}
            assert told(deltas) == files.turns[adapter][1]
            assert end.usage.prompt_tokens == len(FIRST) + len(SECOND)
            assert end.metrics.attempts == 1 + killed

    system.run(body())


def test_text_is_tokenized_piece_by_piece(system: System) -> None:
    async def body() -> None:
        pieces = ["The sea is grey", ", and the ship", " has left."]
        ids = [await system.omni.tokenize({"prompt": piece}) for piece in pieces]
        whole = await system.omni.generate(
            {"prompt_token_ids": [token for piece in ids for token in piece]}, sampling=GREEDY
        )
        async with system.omni.open(system.omni.request({"prompt": pieces[0]}, sampling=GREEDY)) as request:
            for piece in pieces[1:]:
                await request.append(piece)
            await request.close()
            *_, end = [delta async for delta in request]
            assert isinstance(end, Finished)
            assert end.token_ids == whole.token_ids

    system.run(body())


def test_a_wrong_piece_fails_the_request_alone(system: System) -> None:
    async def body() -> None:
        async with begun(system) as request:
            await request.append([1, 999999])
            with pytest.raises(InvalidRequest) as caught:
                await anext(request)
            assert caught.value.field == "prompt_token_ids[1]"
            assert "999999" in caught.value.message

    system.run(body())
