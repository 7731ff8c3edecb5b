"""Several answers to one chat request, through the official client, from a real server of the tiny checkpoint."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server_process import HELLO, NAME, Metrics, Served

SAMPLED: dict[str, Any] = {"model": NAME, "messages": HELLO, "temperature": 1.0, "max_tokens": 24}


@pytest.fixture
def server(plain_server: Served) -> Served:
    return plain_server


def test_streamed_choices_are_those_of_single_requests(client: openai.OpenAI) -> None:
    texts = ["", "", "", ""]
    pieces: list[int] = []
    ends: dict[int, str] = {}
    for chunk in client.chat.completions.create(**SAMPLED, n=4, seed=11, stream=True):
        for choice in chunk.choices:
            if choice.delta.content:
                texts[choice.index] += choice.delta.content
                pieces.append(choice.index)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    singles = [client.chat.completions.create(**SAMPLED, seed=11 + index).choices[0] for index in range(4)]
    assert texts == [one.message.content for one in singles]
    assert [ends[index] for index in range(4)] == [one.finish_reason for one in singles]
    assert len(set(texts)) == 4
    assert set(pieces[:8]) != {pieces[0]}, "they come side by side"


def test_the_prompt_is_computed_once(server: Served, client: openai.OpenAI) -> None:
    def prefilled(metrics: Metrics) -> float:
        values = metrics["segue_stage_prefill_tokens_total"]
        return sum(value for labels, value in values.items() if dict(labels)["stage"] == "thinker")

    before = prefilled(server.until_empty())
    message = [{"role": "user", "content": "A question that nobody has asked here so far, " * 8}]
    reply = client.chat.completions.create(**{**SAMPLED, "messages": message}, n=4)
    assert reply.usage is not None
    after = prefilled(server.until(lambda metrics: prefilled(metrics) > before))
    # a worker's last word before may be older than what the test before this one has asked: a few short prompts
    assert after - before <= reply.usage.prompt_tokens + 64 < 1.5 * reply.usage.prompt_tokens


def test_best_of_and_beams(client: openai.OpenAI) -> None:
    best = client.chat.completions.create(**SAMPLED, n=2, seed=3, extra_body={"best_of": 4, "return_token_ids": True})
    assert [choice.index for choice in best.choices] == [0, 1]
    beams = {**SAMPLED, "temperature": 0, "n": 3, "extra_body": {"beam_width": 4, "return_token_ids": True}}
    once, again = (client.chat.completions.create(**beams) for _ in range(2))
    ids = [[choice.model_extra["token_ids"] for choice in one.choices if choice.model_extra] for one in (once, again)]
    assert ids[0] == ids[1]
    assert len({str(one) for one in ids[0]}) == 3


def test_with_audio_there_is_one_output_per_request(client: openai.OpenAI) -> None:
    spoken = {**SAMPLED, "modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "wav"}}
    limits = {"thinker": {"max_tokens": 4}, "talker": {"max_tokens": 20}}
    reply = client.chat.completions.create(**spoken, n=2, seed=1, extra_body={"sampling": limits})
    assert all(choice.message.audio is not None for choice in reply.choices)
    with pytest.raises(openai.BadRequestError, match="stage 'thinker' feeds talker"):
        client.chat.completions.create(**spoken, extra_body={"sampling": limits, "best_of": 2})
