"""Clients that do not read what they asked for: their requests wait, and no others."""

from __future__ import annotations

import asyncio

import pytest
from toy_system import System, assert_right, both, kill, pid_of

from segue.messages.deltas import AudioDelta, Delta, EncodedDelta, TextDelta
from segue.messages.formats import Format
from segue.orchestrator.omni.outputs import Collector
from segue.orchestrator.requests.client_queue import ClientQueue

pytestmark = pytest.mark.usefixtures("toy_path")

TOKENS = 900
AUDIO_BYTES = TOKENS * 960
"""What one request makes."""
UNREAD = 16384


def long(text: str) -> dict[str, object]:
    return {**both(text), "sampling": {"counter": {"max_tokens": TOKENS, "ignore_eos": True}}}


def test_unread_output_is_bounded_and_delays_nobody(system: System) -> None:
    """While others get as much as they ask for, a client that stopped reading has a fraction of it waiting; so it is
    after its worker was killed; and when it reads on, nothing is missing. Half of them want a file."""

    async def body() -> None:
        config = {"limits": {"unread_bytes": UNREAD}, "stages": {"counter": {"max_model_len": 2048}}}
        async with system.own(**config) as omni:
            texts = [f"slow {number}" for number in range(4)]
            requests = [omni.request(long(text)) for text in texts]
            for request in requests[::2]:
                request.formats = {"audio": Format(name="wav")}
            streams = [omni.stream(request) for request in requests]
            collectors = [Collector(one.request_id, wants_audio=not one.formats) for one in requests]
            sizes = [0] * len(requests)
            for stream, collector in zip(streams, collectors, strict=True):
                collector.add(await anext(stream))
            assert_right(await omni.generate(long("quick")), "quick", TOKENS)
            await kill(pid_of(omni.health(), "tone"))
            assert_right(await omni.generate(long("quicker")), "quicker", TOKENS)

            for request in requests:
                queue = omni.orchestrator.requests[request.request_id].queue
                assert queue.behind
                assert UNREAD < queue.nbytes < AUDIO_BYTES / 3

            async def read(index: int) -> None:
                async for delta in streams[index]:
                    collectors[index].add(delta)
                    if isinstance(delta, EncodedDelta):
                        sizes[index] += len(delta.data)
                assert_right(collectors[index].output(), texts[index], TOKENS)

            await asyncio.gather(*(read(index) for index in range(len(texts))))
            assert sizes[::2] == [44 + (TOKENS + len(text) - 1) * 480 for text in texts[::2]]

    system.run(body)


@pytest.mark.parametrize("delta", [TextDelta("counter", "a" * 300), AudioDelta("tone", bytes(1200), 24000)])
def test_a_client_is_behind_until_it_has_read_half(delta: Delta) -> None:
    async def body() -> None:
        queue = ClientQueue(12_000)
        fell = [queue.put(delta) for _ in range(16)]
        assert fell.index(True) > 1
        assert fell.count(True) == 1  # said once
        caught = [(await queue.get())[1] for _ in range(16)]
        assert caught.count(True) == 1
        assert 4 < caught.index(True) < 15
        assert (queue.nbytes, queue.behind) == (0, False)

    asyncio.run(body())
