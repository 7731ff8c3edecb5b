"""Marks of time and windows, against the library's own functions; and what becomes of a stream that is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segue.kernels.torchvision_shim import ensure_torchvision
from segue.messages.deltas import Delta, Finished, RequestMetrics, SegmentDelta, TextDelta, TokensDelta, Usage
from segue.messages.request import Request
from segue.messages.speech import SpeechFacts, time_mark
from segue.models.speech.speech_seq2seq.rule import SpeechRule
from segue.orchestrator.transcription import frames_transcribed, spans_of, sure_spans, transcribed

ensure_torchvision()

from transformers import GenerationConfig  # noqa: E402
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor  # noqa: E402
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin  # noqa: E402

END, FIRST, VOCAB = 5, 8, 20
"""Words are 0 to 4; 7 says that there are no times; 8 is 0.00 seconds."""
FACTS = SpeechFacts({}, ["transcribe"], FIRST, window=3000, stride=2)
WORDS = st.integers(0, 4)


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Any that the rules of times allow, and the odd one that they do not: cut off anywhere."""
    ids: list[int] = []
    time = FIRST
    for _ in range(draw(st.integers(1, 4))):
        time = draw(st.integers(time, VOCAB - 1))
        ids += [time, *draw(st.lists(WORDS, min_size=1, max_size=3))]
        time = draw(st.integers(min(time + 1, VOCAB - 1), VOCAB - 1))
        ids.append(time)
    return ids[: draw(st.integers(1, len(ids)))]


@given(texts(), st.integers(1, 3000))
def test_segments_are_those_of_the_library(ids: list[int], frames: int) -> None:
    segments, offset = WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(ids),
        seek_outputs=[None],
        time_offset=torch.zeros(1, dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    spans = spans_of(ids, FIRST, frames)
    assert [ids[span.start : span.stop] for span in spans] == [one["tokens"].tolist() for one in segments]
    assert [(span.begins * 0.02, span.ends * 0.02) for span in spans] == [
        (pytest.approx(float(one["start"])), pytest.approx(float(one["end"]))) for one in segments
    ]
    assert frames_transcribed(ids, FACTS, frames) == int(offset)


@given(texts(), texts())
def test_what_was_given_out_stays(ids: list[int], more: list[int]) -> None:
    early = sure_spans(ids, FIRST)
    assert spans_of([*ids, *more], FIRST, 3000)[: len(early)] == early


@given(texts(), st.integers(0, 2**31), st.sampled_from([None, 3]))
def test_the_rule_of_times_is_the_librarys(ids: list[int], seed: int, latest: int | None) -> None:
    generation = GenerationConfig(
        eos_token_id=END, no_timestamps_token_id=FIRST - 1, max_initial_timestamp_index=latest
    )
    theirs = WhisperTimeStampLogitsProcessor(generation, begin_index=2)
    rule = SpeechRule([], True, FIRST, END, latest)
    generator = torch.Generator().manual_seed(seed)
    for count in range(len(ids) + 1):
        logits = 3 * torch.randn(1, VOCAB, generator=generator)
        wanted = theirs(torch.tensor([[0, 0, *ids[:count]]]), logits)
        rule.apply(logits[0], count)
        assert torch.equal(logits, wanted)
        if count < len(ids):
            rule.saw(ids[count])


WINDOWS = {"0": [8, 1, 10, 10, 2, 12, 12, 3, END], "8": [8, 3, 4, END]}


class Play:
    """Generations as they are asked for, a token at a time; `frames` of sound."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.asked: list[Request] = []
        self.left: list[str] = []

    async def __call__(self, request: Request) -> AsyncGenerator[Delta]:
        self.asked.append(request)
        over = False
        try:
            if request.modalities == ["tokens"]:
                yield TokensDelta("input", [6], ["<s>"], "<s>", self.frames, self.frames / 100)
            else:
                ids = WINDOWS[str(request.options.get("seek", 0))]
                for token in ids:
                    text = time_mark(token - FIRST) if token >= FIRST else "" if token == END else f" w{token}"
                    yield TextDelta("llm", text, [token])
                usage = Usage(3, 0, {"text": 3}, {"text": len(ids)})
                yield Finished("stop", {"llm": ids}, usage, RequestMetrics())
            over = True
        finally:
            if not over:
                self.left.append(request.request_id)


def heard(play: Play, count: int | None = None, **options: Any) -> list[Delta]:
    """Deltas, of which so many are taken."""

    async def take() -> list[Delta]:
        deltas: list[Delta] = []
        stream = transcribed(play, Request(request_id="r", options=options), FACTS, "llm")
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == count:
                await stream.aclose()
        return deltas

    return asyncio.run(take())


def test_windows_follow_each_other() -> None:
    """What is behind the last pair of marks is heard again in the next window."""
    play = Play(frames=100)
    deltas = heard(play, timestamps=True)
    assert [delta.text for delta in deltas if isinstance(delta, TextDelta)] == [" w1", " w2", " w3 w4"]
    segments = [delta for delta in deltas if isinstance(delta, SegmentDelta)]
    assert [(one.start, one.end, one.seek) for one in segments] == [(0.0, 0.04, 0), (0.04, 0.08, 0), (0.08, 1.0, 8)]
    assert [request.options.get("seek") for request in play.asked[1:]] == [0, 8]
    last = deltas[-1]
    assert isinstance(last, Finished)
    assert last.token_ids == {"llm": [8, 1, 10, 10, 2, 12, 12, 8, 3, 4]}
    assert last.usage.prompt_tokens == 6
    assert last.audio_seconds == 1.0


def test_without_times_marks_are_no_text() -> None:
    deltas = heard(Play(frames=100))
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == " w1 w2 w3"
    assert not [delta for delta in deltas if isinstance(delta, SegmentDelta)]


def test_more_than_a_window_has_times() -> None:
    play = Play(frames=3001)
    WINDOWS["3000"] = WINDOWS["8"]
    WINDOWS["8"], before = [8, 1, END], WINDOWS["8"]
    try:
        heard(play)
    finally:
        WINDOWS["8"] = before
    assert {request.options["timestamps"] for request in play.asked[1:]} == {True}


def test_a_stream_that_is_left() -> None:
    """Its generation is closed with it."""
    play = Play(frames=100)
    heard(play, 1, timestamps=True)
    assert play.left == ["r-0"]
