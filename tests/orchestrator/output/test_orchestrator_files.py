"""Files that the output stage makes: right, bounded, and the same bytes whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_system import Gate, System, both, expected_ids, kill, pid_of

from segue.messages.deltas import AudioDelta, EncodedDelta, Finished, TextDelta
from segue.messages.errors import InvalidRequest
from segue.messages.formats import AUDIO_FORMATS, Format
from segue.messages.request import Request
from segue.orchestrator.omni.async_omni import AsyncOmni

pytestmark = pytest.mark.usefixtures("toy_path")

TOKENS = 300
LONG = 1500
UNREAD = 32768
FORMATS = [
    *(Format(name=name) for name in AUDIO_FORMATS),
    Format(name="opus", speed=1.25, rate=16000),
    Format(name="wav", whole=True),
]


def request(omni: AsyncOmni, text: str, form: Format, **options: Any) -> Request:
    sampling = {"counter": {"max_tokens": TOKENS, "ignore_eos": True}}
    made = omni.request({**both(text, **options), "sampling": sampling})
    made.formats = {"audio": form}
    return made


async def file_of(omni: AsyncOmni, asked: Request, tokens: int = TOKENS) -> bytes:
    """Each byte comes once, in order, the end last; text comes as without a file."""
    data, text, ended = b"", "", False
    async for delta in omni.stream(asked):
        assert not isinstance(delta, AudioDelta)
        if isinstance(delta, TextDelta):
            text += delta.text
        elif isinstance(delta, EncodedDelta):
            assert (delta.stage, delta.kind, delta.index, delta.start, ended) == ("tone", "audio", 0, len(data), False)
            data, ended = data + delta.data, delta.last
        elif isinstance(delta, Finished):
            assert delta.usage.completion_modalities == {"text": tokens}
            assert delta.metrics.audio_seconds > 0
    assert ended
    assert len(text) > tokens * 0.9
    return data


def long(omni: AsyncOmni, text: str) -> Request:
    made = request(omni, text, Format(name="wav"))
    made.sampling["counter"].max_tokens = LONG
    return made


def samples(text: str) -> np.ndarray:
    from segue_toy.stages import SAMPLES_PER_TOKEN, VOCAB

    prompt = [1 + ord(letter) % (VOCAB - 1) for letter in text]
    return np.repeat(np.array([*prompt, *expected_ids(text, TOKENS)[:-1]], np.float32) / VOCAB, SAMPLES_PER_TOKEN)


def test_the_file_holds_the_samples(system: System) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            expected = np.rint(samples("hello") * 32767).astype("<i2").tobytes()
            assert await file_of(omni, request(omni, "hello", Format(name="pcm16"))) == expected
            whole = await file_of(omni, request(omni, "hello", Format(name="wav", whole=True)))
            assert whole[40:] == len(expected).to_bytes(4, "little") + expected

    system.run(body)


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(["output"], marks=pytest.mark.nightly),
        pytest.param(["tone"], marks=pytest.mark.nightly),
        ["output", "tone"],
    ],
)
def test_the_bytes_are_the_same_after_a_kill(system: System, tmp_path: Path, killed: list[str]) -> None:
    """kill -9 of the output stage, of the stage before it, and of both, while files of every format are being made."""

    async def body() -> None:
        gate = Gate(tmp_path)
        async with system.shared() as omni:
            undisturbed = await asyncio.gather(
                *(file_of(omni, request(omni, f"say {number}", form)) for number, form in each)
            )
            held_at = gate.option("tone", TOKENS // 2)
            running = [
                asyncio.create_task(file_of(omni, request(omni, f"say {number}", form, hold=held_at)))
                for number, form in each
            ]
            held = await gate.reached()
            gate.remove()
            for stage in killed:
                await kill(pid_of(omni.health(), stage))
            assert not all(task.done() for task in running)
            os.close(held)
            assert await asyncio.gather(*running) == undisturbed

    each = list(enumerate(FORMATS))
    system.run(body)


@pytest.mark.nightly  # tests/orchestrator/output/test_slow_reader.py has a few of them
def test_fifty_clients_that_do_not_read_delay_nobody(system: System) -> None:
    """What they cost is bounded, in the orchestrator and on the edge to the output stage, and what others get complete,
    also after the output stage was killed."""

    async def body() -> None:
        config = {"limits": {"unread_bytes": UNREAD}, "stages": {"counter": {"max_model_len": 2048}}}
        async with system.own(**config) as omni:
            asked = [long(omni, f"slow {number}") for number in range(50)]
            streams = [omni.stream(one) for one in asked]
            for stream in streams:
                while not isinstance(await anext(stream), EncodedDelta):
                    pass
            undisturbed = await file_of(omni, long(omni, "quick"), LONG)
            for one in asked:
                queue = omni.orchestrator.requests[one.request_id].queue
                assert queue.behind
                assert queue.nbytes < len(undisturbed) / 2  # some was on its way when its worker was told to pause
            await kill(pid_of(omni.health(), "output"))
            assert await file_of(omni, long(omni, "quick"), LONG) == undisturbed
            stages = [stage for stats in omni.orchestrator.stats.values() for stage in stats.stages]
            [tone] = [stage for stage in stages if stage.stage == "tone"]
            assert 0 < tone.edges["tone->output"]["in_flight_bytes"] < 50 * 2 * len(undisturbed) / 3  # as float32
            for stream in streams:
                await stream.aclose()

    system.run(body)


@pytest.mark.parametrize(
    ("formats", "field", "said"),
    [
        ({"audio": Format(name="mp4")}, "formats.audio.name", "one of wav"),
        ({"audio": Format(name="mp3", speed=9)}, "formats.audio.speed", "0.25 to 4"),
        ({"text": Format(name="txt")}, "formats.text", "no files of 'text'"),
    ],
)
def test_formats_are_checked(system: System, formats: dict[str, Format], field: str, said: str) -> None:
    async def body() -> None:
        async with system.shared() as omni:
            asked = omni.request(both("a"))
            asked.formats = formats
            with pytest.raises(InvalidRequest, match=said) as caught:
                omni.stream(asked)
            assert caught.value.field == field

    system.run(body)
