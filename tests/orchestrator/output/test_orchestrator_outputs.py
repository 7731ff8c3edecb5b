"""Requests with several outputs through the whole system: streamed by index, and recovered by index."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from toy_system import Gate, System, collect, kill, pid_of

from segue.messages.deltas import ChoiceEnded, Delta, Finished, TextDelta
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.async_omni import AsyncOmni
from segue.orchestrator.omni.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("toy_path")

PROMPT = "several"
SAMPLED: dict[str, Any] = {"temperature": 2.0, "max_tokens": 16, "ignore_eos": True}
SEED = 2**64 - 2


def ask(hold: dict[str, Any] | None = None, *, seed: int = SEED, **sampling: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": PROMPT}],
        "seed": seed,
        "sampling": SamplingParams(**{**SAMPLED, **sampling}),
        "options": {"hold": hold} if hold else {},
    }


async def apart(omni: AsyncOmni, count: int) -> list[RequestOutput]:
    seeds = [(SEED + index) % 2**64 for index in range(count)]
    return list(await asyncio.gather(*(omni.generate(ask(seed=seed)) for seed in seeds)))


def said(output: RequestOutput) -> list[tuple[str, list[int], str]]:
    return [(one.text, one.token_ids, one.finish_reason) for one in output.outputs]


def assert_ends_told(deltas: list[Delta]) -> None:
    """Of each output once, after all of its text, as it is said at the end."""
    end = deltas[-1]
    assert isinstance(end, Finished)
    ends = [delta.choice for delta in deltas if isinstance(delta, ChoiceEnded)]
    assert [(one.finish_reason, one.token_ids) for one in sorted(ends, key=lambda one: one.index)] == [
        (one.finish_reason, one.token_ids) for one in end.choices
    ]
    over: set[int] = set()
    for delta in deltas:
        if isinstance(delta, ChoiceEnded):
            over.add(delta.choice.index)
        assert not (isinstance(delta, TextDelta) and delta.index in over)


def test_an_output_s_end_is_told_when_it_ends(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            deltas: list[Delta] = []
            asked = ask(n=4, stop_token_ids=list(range(0, 97, 9)))
            output = await collect(omni, asked, deltas.append)
            assert len({len(one.token_ids) for one in output.outputs}) > 1
            assert_ends_told(deltas)
            first = next(place for place, delta in enumerate(deltas) if isinstance(delta, ChoiceEnded))
            assert any(isinstance(delta, TextDelta) for delta in deltas[first:]), "others go on"
            alone: list[Delta] = []
            await collect(omni, ask(), alone.append)
            assert not any(isinstance(delta, ChoiceEnded) for delta in alone), "the end of it all says it"

    system.run(body)


def test_n_outputs_are_those_of_n_requests(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            output = await omni.generate(ask(n=4))
            alone = await apart(omni, 4)
            assert said(output) == [said(one)[0] for one in alone]
            assert len({one.text for one in output.outputs}) == 4
            assert [one.index for one in output.outputs] == [0, 1, 2, 3]
            assert (output.text, output.token_ids["counter"]) == (output.outputs[0].text, output.outputs[0].token_ids)
            assert output.usage.prompt_tokens == len(PROMPT)
            assert output.usage.completion_modalities == {"text": 4 * 16}
            assert output.outputs[0].cumulative_logprob is None

    system.run(body)


def test_deltas_have_their_index(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            deltas: list[Delta] = []
            output = await collect(omni, ask(n=3), deltas.append)
            texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
            assert {delta.index for delta in texts[:3]} == {0, 1, 2}, "they are written side by side"
            for one in output.outputs:
                mine = [delta for delta in texts if delta.index == one.index]
                assert "".join(delta.text for delta in mine) == one.text
                assert [token for delta in mine for token in delta.token_ids] == one.token_ids
            end = deltas[-1]
            assert isinstance(end, Finished)
            assert [choice.index for choice in end.choices] == [0, 1, 2]

    system.run(body)


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 3},
        {"n": 3, "stop_token_ids": list(range(0, 97, 9))},
        {"n": 2, "best_of": 5},
        {"n": 3, "beam_width": 4, "temperature": 0.0},
    ],
    ids=["n", "n, some ended", "best_of", "beams"],
)
def test_a_killed_worker_loses_no_output(system: System, tmp_path: Path, sampling: dict[str, Any]) -> None:
    """kill -9 while the outputs are being written: each goes on from its own journal, nothing comes twice. What is
    given at the end only is made anew, the same."""

    async def body() -> None:
        async with system.shared() as omni:
            expected = await omni.generate(ask(**sampling))
            gate = Gate(tmp_path)
            deltas: list[Delta] = []
            written, every = asyncio.Event(), 3 if sampling["n"] == 3 and "beam_width" not in sampling else 0

            def note(delta: Delta) -> None:
                deltas.append(delta)
                if len({delta.index for delta in deltas if isinstance(delta, TextDelta)}) == every:
                    written.set()

            hold = gate.option("forward", len(PROMPT) + 9)
            task = asyncio.create_task(collect(omni, ask(hold, **sampling), note))
            held = await gate.reached()
            if every:
                await written.wait()  # what was made before the gate is on its way
            before = list(deltas)
            await kill(pid_of(omni.health(), "counter"))
            gate.remove()
            os.close(held)
            output = await task
            assert output.metrics.attempts == 2
            assert said(output) == said(expected)
            assert [one.cumulative_logprob for one in output.outputs] == pytest.approx(
                [one.cumulative_logprob for one in expected.outputs]
            )
            assert output.usage.completion_modalities == expected.usage.completion_modalities
            streamed = len({delta.index for delta in before if isinstance(delta, TextDelta)})
            assert streamed == every
            for one in output.outputs:
                ids = [i for d in deltas if isinstance(d, TextDelta) and d.index == one.index for i in d.token_ids]
                assert ids == one.token_ids
            assert_ends_told(deltas)

    system.run(body)


def test_the_best_have_their_scores(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            for sampling in ({"n": 2, "best_of": 6}, {"n": 4, "beam_width": 4, "temperature": 0.0}):
                output = await omni.generate(ask(**sampling))
                scores = [(one.cumulative_logprob or 0.0) / len(one.token_ids) for one in output.outputs]
                assert len(scores) == sampling["n"]
                assert scores == sorted(scores, reverse=True)

    system.run(body)


def test_a_stage_that_feeds_another_has_one_output(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            with pytest.raises(InvalidRequest, match="stage 'counter' feeds tone") as caught:
                await omni.generate({**ask(n=2), "modalities": ["text", "audio"]})
            assert caught.value.field == "sampling.counter.n"

    system.run(body)


@pytest.mark.parametrize(
    ("sampling", "field", "message"),
    [
        ({"n": 0}, "n", "n is 0; it must be an integer from 1 to 128"),
        ({"n": 129}, "n", "n is 129; it must be an integer from 1 to 128"),
        ({"n": 3, "best_of": 2}, "best_of", r"best_of is 2; it must be at least n \(3\)"),
        ({"n": 3, "beam_width": 2}, "beam_width", r"beam_width is 2; it must be at least n \(3\)"),
        ({"beam_width": 17}, "beam_width", "beam_width is 17; it must be an integer from 1 to 16"),
        ({"beam_width": 2, "best_of": 2}, "best_of", "best_of is 2 and beam_width is 2"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature", "temperature is 0.5, but beam search"),
        ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty", "length_penalty is 11.0; it must be a number"),
    ],
)
def test_what_does_not_go_together(system: System, sampling: dict[str, Any], field: str, message: str) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            with pytest.raises(InvalidRequest, match=rf"sampling\.counter\.{message}") as caught:
                omni.stream(omni.request("x", sampling=SamplingParams(**sampling)))
            assert caught.value.field == f"sampling.counter.{field}"

    system.run(body)


def test_a_deployment_does_not_set_how_many_outputs_there_are(toy_dir: Path) -> None:
    with pytest.raises(ConfigError, match="only a request can ask for several outputs"):
        AsyncOmni(toy_dir, config={"stages": {"counter": {"sampling": {"n": 2}}}})
