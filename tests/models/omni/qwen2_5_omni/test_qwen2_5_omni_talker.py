"""The talker, driven by the thinker: the same codes as `generate` under every condition of serving."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from qwen2_5_omni_family import (
    CASES,
    TALKER_TOKENS,
    THINKER_TOKENS,
    Answer,
    Ask,
    Case,
    Pipeline,
    context,
    input_payload,
    library_model,
    processed,
    reference_answer,
    stage_request,
    tight,
)

from segue.engines.autoregressive.contract import Fed, FlatBatch
from segue.engines.autoregressive.output import CapturedRows, TokenOutput
from segue.engines.contract import Payload, StageRequest
from segue.media.audio import decode_audio
from segue.media.image import decode_image
from segue.media.limits import MediaLimits
from segue.media.video import decode_video
from segue.messages.errors import ConfigError, InvalidRequest, NotFound, StageFailed
from segue.messages.request import MediaPart, Message, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen2_5_omni.encoder import Encoder
from segue.models.omni.qwen2_5_omni.input import InputProcessor
from segue.models.omni.qwen2_5_omni.library import Qwen2_5OmniForConditionalGeneration
from segue.models.omni.qwen2_5_omni.probe import generate_drops_mask
from segue.models.omni.qwen2_5_omni.stages import TRANSFERS
from segue.models.omni.qwen2_5_omni.talker import Talker
from segue.models.omni.qwen2_5_omni.thinker import Thinker
from segue.models.shared.omni.chat import audio_of_videos

if TYPE_CHECKING:
    from conftest import Reference

Codes = tuple[list[int], list[int]]
BY_NAME = {case.name: case for case in CASES}
WITH_MEDIA = [case for case in CASES if case.name != "text"]


@pytest.fixture(scope="module")
def encoder(tiny_dir: Path) -> Encoder:
    return Encoder(context(tiny_dir, "encoder"))


@pytest.fixture(scope="module")
def thinker(tiny_dir: Path) -> Thinker:
    return Thinker(context(tiny_dir, "thinker"))


@pytest.fixture(scope="module")
def talker(tiny_dir: Path) -> Talker:
    return Talker(context(tiny_dir, "talker"))


@pytest.fixture
def pipeline(encoder: Encoder, thinker: Thinker, talker: Talker) -> Callable[..., Pipeline]:
    return lambda **config: Pipeline(encoder, thinker, talker, **config)


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> dict[str, Codes]:
    """The reference's replies and codes."""
    return {case.name: reference_answer(tiny_dir, processed(tiny_dir, case), case) for case in CASES}


def asks(tiny_dir: Path, cases: Any = CASES, **more: Any) -> list[Ask]:
    return [Ask(input_payload(processed(tiny_dir, case), case), **more) for case in cases]


def codes_of(answer: Answer) -> list[int]:
    """The codes that left for the vocoder, in order."""
    codes: list[int] = []
    for payload in answer.spoken:
        assert payload["start"] == len(codes)
        codes += payload["codes"].tolist()
    return codes


def said(answers: list[Answer]) -> list[Codes]:
    return [(answer.reply, codes_of(answer)) for answer in answers]


# --- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reply_and_codes_are_the_references(
    tiny_dir: Path, pipeline: Callable[..., Pipeline], expected: dict[str, Codes], case: Case
) -> None:
    [answer] = pipeline().run(asks(tiny_dir, [case]))
    assert (answer.reply, codes_of(answer)) == expected[case.name]
    ended = len(answer.codes) < TALKER_TOKENS or answer.codes[-1] in (290, 292)
    assert answer.finish["talker"] == ("stop" if ended else "length")
    assert len(answer.codes) == len(codes_of(answer)) + ended


def test_codes_depend_on_the_prompt_and_some_end_by_themselves(expected: dict[str, Codes]) -> None:
    codes = [codes for _, codes in expected.values()]
    assert len({tuple(spoken) for spoken in codes}) == len(codes)
    assert any(0 < len(spoken) < TALKER_TOKENS for spoken in codes)


@pytest.mark.parametrize("config", [{}, {"max_tokens_per_step": 37}], ids=["whole prompts", "chunked prefill"])
def test_in_a_batch_and_again_after_a_prefix_hit(
    tiny_dir: Path, pipeline: Callable[..., Pipeline], expected: dict[str, Codes], config: dict[str, int]
) -> None:
    run = pipeline(**config)
    assert said(run.run(asks(tiny_dir))) == list(expected.values())
    again = run.run(asks(tiny_dir))
    assert said(again) == list(expected.values())
    assert all(answer.cached_tokens for answer in again), "no prefix was found again"


def test_after_preemption_of_both_stages(
    tiny_dir: Path, pipeline: Callable[..., Pipeline], expected: dict[str, Codes]
) -> None:
    cases = [BY_NAME[name] for name in ("text", "image", "audio")]
    run = pipeline(**tight(tiny_dir, cases))
    assert said(run.run(asks(tiny_dir, cases))) == [expected[case.name] for case in cases]
    assert run.thinker.stats()["preemptions_total"] > 0
    assert run.talker.stats()["preemptions_total"] > 0


def test_the_talker_starts_before_the_thinker_has_ended(tiny_dir: Path, pipeline: Callable[..., Pipeline]) -> None:
    run = pipeline()
    order: list[str] = []
    take = run._take

    def note(stage: str, output: TokenOutput, answer: Answer) -> None:
        order.append(stage)
        take(stage, output, answer)

    run._take = note  # type: ignore[method-assign]
    run.run(asks(tiny_dir, [BY_NAME["text"]]))
    # prefill and one step of the thinker, and the talker has its prompt: the reply's first token has its row
    assert order[:3] == ["thinker", "thinker", "talker"]
    assert order.index("talker") < len(order) - order[::-1].index("thinker") - 1


def test_the_other_voice(tiny_dir: Path, pipeline: Callable[..., Pipeline], expected: dict[str, Codes]) -> None:
    answers = pipeline().run(asks(tiny_dir, voice="Ethan"))
    others = [reference_answer(tiny_dir, processed(tiny_dir, case), case, voice="Ethan") for case in CASES]
    assert said(answers) == others
    assert {answer.spoken[0]["voice"] for answer in answers} == {"Ethan"}
    assert others != list(expected.values())


@pytest.mark.parametrize("tokens", [2, 3, 4, 7])
def test_short_replies(tiny_dir: Path, pipeline: Callable[..., Pipeline], tokens: int) -> None:
    case = BY_NAME["audio"]
    [answer] = pipeline().run(asks(tiny_dir, [case], tokens=tokens))
    assert len(answer.reply) == tokens
    assert (answer.reply, codes_of(answer)) == reference_answer(
        tiny_dir, processed(tiny_dir, case), case, thinker_tokens=tokens
    )


def test_a_padded_prompt_of_the_reference_is_the_form_it_was_trained_in(
    tiny_dir: Path, encoder: Encoder, thinker: Thinker, expected: dict[str, Codes]
) -> None:
    trained = Talker(context(tiny_dir, "talker", options={"prompt_form": "trained"}))
    answers = said(Pipeline(encoder, thinker, trained).run(asks(tiny_dir)))
    pad = library_model(tiny_dir).config.thinker_config.pad_token_id
    for case, answer in zip(CASES, answers, strict=True):
        inputs = dict(processed(tiny_dir, case))
        inputs["input_ids"] = torch.cat([torch.tensor([[pad]]), inputs["input_ids"]], dim=1)
        zero = torch.zeros(1, 1, dtype=inputs["attention_mask"].dtype)
        inputs["attention_mask"] = torch.cat([zero, inputs["attention_mask"]], dim=1)
        assert answer == reference_answer(tiny_dir, inputs, case)
    if generate_drops_mask():
        assert answers != list(expected.values())
    else:
        assert answers == list(expected.values())


# --- from the request ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [["image"], ["audio"], ["video"], ["image", "audio", "video"]], ids="+".join)
def test_real_files_from_the_request_to_the_codes(
    tiny_dir: Path, assets: Path, reference: Any, pipeline: Callable[..., Pipeline], kinds: list[str]
) -> None:
    """Photo, speech and a clip with its sound, as a client sends them; the library reads the same files."""
    files = {"image": "photo.jpg", "audio": "speech.wav", "video": "video.mp4"}
    parts = [MediaPart(kind, (assets / files[kind]).read_bytes()) for kind in kinds]  # type: ignore[arg-type]
    request = Request(
        request_id="r",
        messages=[Message("user", [*parts, TextPart("What is this?")])],
        options={"use_audio_in_video": "video" in kinds},
    )
    payload = InputProcessor(context(tiny_dir, "input")).process(request)
    limits = MediaLimits()
    media: dict[str, Any] = {}
    heard: list[Any] = []
    sources: list[int | None] = []
    for part in parts:
        if part.kind == "image":
            media["images"] = [decode_image(part, limits)]
        elif part.kind == "audio":
            heard.append(decode_audio(part, 16000, limits))
            sources.append(None)
        else:
            clip = decode_video(part, 2.0, limits, audio_rate=16000)
            media["videos"] = [clip.frames]
            heard.append(clip.audio)
            sources.append(0)
    if heard:
        media["audio"] = heard
    inputs = reference.inputs("What is this?", *kinds, **media, **audio_of_videos(sources))
    theirs = reference.generate(
        inputs, max_tokens=THINKER_TOKENS, max_codes=TALKER_TOKENS, use_audio_in_video="video" in kinds
    )
    [answer] = pipeline().run([Ask(payload)])
    assert (answer.reply, codes_of(answer)) == (theirs.token_ids, theirs.codes)
    assert len(theirs.codes) > 4


# --- what would change them ------------------------------------------------------------------------------------------


class ShowsMedia(Thinker):
    """Leaves the embeddings of media in the rows."""

    def _without_media(self, embeds: torch.Tensor, batch: FlatBatch) -> torch.Tensor:
        return embeds


@pytest.mark.parametrize("case", WITH_MEDIA, ids=lambda case: case.name)
def test_media_left_in_the_rows_would_change_the_codes(
    tiny_dir: Path, encoder: Encoder, talker: Talker, expected: dict[str, Codes], case: Case
) -> None:
    [answer] = Pipeline(encoder, ShowsMedia(context(tiny_dir, "thinker")), talker).run(asks(tiny_dir, [case]))
    reply, codes = expected[case.name]
    assert answer.reply == reply
    assert codes_of(answer) != codes


class ShiftsRows(Talker):
    """Gives every code the row of the one before it."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        fed = super().feed(state, upstream, payload, final=final)
        if fed.prompt is not None and fed.conditioning is not None:
            fed.conditioning = torch.cat([self._text_end, fed.conditioning])
        return fed


class SmallerEnd(Talker):
    """Takes the text's padding for its end."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self._text_end = self._text_pad[None]


@pytest.mark.parametrize("spoilt", [ShiftsRows, SmallerEnd])
def test_rows_out_of_place_would_change_the_codes(
    tiny_dir: Path, encoder: Encoder, thinker: Thinker, expected: dict[str, Codes], spoilt: type[Talker]
) -> None:
    talker = spoilt(context(tiny_dir, "talker"))
    assert said(Pipeline(encoder, thinker, talker).run(asks(tiny_dir))) != list(expected.values())


# --- chunk by chunk --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chunks(tiny_dir: Path, encoder: Encoder, thinker: Thinker, talker: Talker) -> list[tuple[Payload, bool]]:
    """What left the thinker for the talker, of one request."""
    [answer] = Pipeline(encoder, thinker, talker).run(asks(tiny_dir, [BY_NAME["image"]]))
    request = stage_request("thinker", upstreams={"input"})
    pairs = [(TRANSFERS["thinker", "talker"](request, output), output.finished) for output in answer.thought]
    return [(payload, final) for payload, final in pairs if payload is not None]


def fed_by(talker: Talker, chunks: list[tuple[Payload, bool]]) -> tuple[Any, torch.Tensor, Any]:
    """(prompt, all conditioning rows, tail)."""
    state = talker.begin(stage_request("talker", upstreams={"thinker"}))
    prompt, rows, tail = None, [], None
    for payload, final in chunks:
        fed = talker.feed(state, "thinker", payload, final=final)
        assert not fed.nothing
        assert fed.prompt is None or prompt is None
        prompt = fed.prompt or prompt
        rows += [] if fed.conditioning is None else [fed.conditioning]
        tail = fed.tail
    return prompt, torch.cat(rows), tail


def split(chunks: list[tuple[Payload, bool]], size: int) -> list[tuple[Payload, bool]]:
    """The same rows in chunks of another size."""
    rows = torch.cat([payload["rows"] for payload, _ in chunks])
    ids = [token for payload, _ in chunks for token in payload["reply_ids"]]
    pieces = []
    for start in range(0, len(rows), size):
        last = start + size >= len(rows)
        piece: Payload = {"rows_start": start, "rows": rows[start : start + size], "first_index": 0, "reply_ids": []}
        if start == 0:
            piece["prompt"] = chunks[0][0]["prompt"]
        if last:
            piece["reply_ids"] = ids
        pieces.append((piece, last))
    return pieces


def test_the_prompt_and_rows_of_a_reply(talker: Talker, chunks: list[tuple[Payload, bool]]) -> None:
    rows = torch.cat([payload["rows"] for payload, _ in chunks])
    length = chunks[0][0]["prompt"]["length"]
    prompt, conditioning, tail = fed_by(talker, chunks)
    assert prompt.token_ids == [294] * length + [290, 291]
    assert list(prompt.identity) == []
    assert prompt.positions.shape == (3, length + 2)
    assert torch.equal(conditioning, torch.cat([rows[length + 1 :], talker._text_end]))
    assert torch.equal(tail, talker._text_pad)


@pytest.mark.parametrize("size", [1, 3, 17, 1000])
def test_chunks_of_any_size_say_the_same(talker: Talker, chunks: list[tuple[Payload, bool]], size: int) -> None:
    prompt, rows, tail = fed_by(talker, chunks)
    other, other_rows, other_tail = fed_by(talker, split(chunks, size))
    torch.testing.assert_close(other.embeds, prompt.embeds, atol=1e-6, rtol=0)
    assert torch.equal(other.positions, prompt.positions)
    assert torch.equal(other_rows, rows)
    assert torch.equal(other_tail, tail)


@pytest.mark.parametrize("lost_at", [1, 2, 5])
def test_rows_that_come_again_after_a_lost_thinker_are_taken_once(
    talker: Talker, chunks: list[tuple[Payload, bool]], lost_at: int
) -> None:
    first = [(payload, False) for payload, _ in chunks[:lost_at]]
    prompt, rows, _ = fed_by(talker, [*first, *split(chunks, 11)])
    whole, whole_rows, _ = fed_by(talker, chunks)
    torch.testing.assert_close(prompt.embeds, whole.embeds, atol=1e-6, rtol=0)
    assert torch.equal(rows, whole_rows)


def test_a_row_of_the_last_token_is_not_spoken(talker: Talker, chunks: list[tuple[Payload, bool]]) -> None:
    payload, _ = chunks[-1]
    longer = {**payload, "rows": torch.cat([payload["rows"], payload["rows"]])}
    _, rows, _ = fed_by(talker, [*chunks[:-1], (longer, True)])
    assert torch.equal(rows, fed_by(talker, chunks)[1])


def test_a_missing_row_fails_the_request(talker: Talker, chunks: list[tuple[Payload, bool]]) -> None:
    with pytest.raises(StageFailed, match="never came"):
        fed_by(talker, [chunks[0], *chunks[2:]])


def test_a_reply_of_one_token_leaves_nothing_to_say(talker: Talker, chunks: list[tuple[Payload, bool]]) -> None:
    state = talker.begin(stage_request("talker", upstreams={"thinker"}))
    payload = {**chunks[0][0], "reply_ids": [642]}
    fed = talker.feed(state, "thinker", payload, final=True)
    assert fed.nothing
    assert fed.prompt is None
    assert fed.conditioning is None
    early = talker.begin(stage_request("talker", upstreams={"thinker"}))
    assert talker.feed(early, "thinker", {"first_index": 0, "reply_ids": [642]}, final=True).nothing


# --- transfers, voices, defaults -------------------------------------------------------------------------------------


def test_no_chunk_for_a_step_without_rows() -> None:
    send = TRANSFERS["thinker", "talker"]
    request = stage_request("thinker", upstreams={"input"})
    assert send(request, TokenOutput("r", token_ids=[5])) is None
    end = send(request, TokenOutput("r", token_ids=[5], first_index=3, finished=True))
    assert end == {"first_index": 3, "reply_ids": [5]}
    rows = CapturedRows(7, torch.zeros(2, 3))
    sent = send(request, TokenOutput("r", captured=rows))
    assert sent is not None
    assert sent["rows_start"] == 7
    assert "prompt" not in sent


@pytest.mark.parametrize(
    ("output", "codes"),
    [
        (TokenOutput("r", token_ids=[3, 4], first_index=6), [3, 4]),
        (TokenOutput("r", token_ids=[4, 292], first_index=6, finished=True, finish_reason="stop"), [4]),
        (TokenOutput("r", token_ids=[4, 5], first_index=6, finished=True, finish_reason="length"), [4, 5]),
        (TokenOutput("r", token_ids=[290], first_index=6, finished=True, finish_reason="stop"), []),
        (TokenOutput("r", first_index=6, finished=True, finish_reason="stop"), []),
        (TokenOutput("r", first_index=6), None),
    ],
)
def test_codes_without_the_end_token(output: TokenOutput, codes: list[int] | None) -> None:
    sent = TRANSFERS["talker", "vocoder"](stage_request("talker", upstreams={"thinker"}, voice="Ethan"), output)
    if codes is None:
        assert sent is None
        return
    assert sent is not None
    assert sent["codes"].tolist() == codes
    assert sent["codes"].dtype == torch.long
    assert sent["start"] == 6
    assert "voice" not in sent


def test_an_unknown_voice_names_the_nearest(talker: Talker) -> None:
    with pytest.raises(NotFound, match=r"did you mean 'Chelsie'.*Chelsie, Ethan") as caught:
        talker.begin(stage_request("talker", upstreams={"thinker"}, voice="Chelsea"))
    assert caught.value.field == "voice"


def test_defaults_are_those_of_generate(talker: Talker) -> None:
    signature = inspect.signature(Qwen2_5OmniForConditionalGeneration.generate)
    defaults = {name: p.default for name, p in signature.parameters.items()}
    mine = talker.default_sampling
    assert mine.temperature == defaults["talker_temperature"]
    assert mine.top_k == defaults["talker_top_k"]
    assert mine.top_p == defaults["talker_top_p"]
    assert mine.repetition_penalty == defaults["talker_repetition_penalty"]
    assert mine.max_tokens == defaults["talker_max_new_tokens"]
    assert talker.end_token_ids == {290, 292}


@pytest.mark.parametrize("token", [291, 293, 294, 299])
def test_what_is_no_code_is_never_said(talker: Talker, reference: Reference, token: int) -> None:
    hidden = reference.model.talker.codec_head.weight[token : token + 1].detach() * 100  # nothing would be likelier
    said = int(talker.logits(hidden)[0].argmax())
    assert said < 290 or said in talker.end_token_ids


def spoken(**sampling: Any) -> StageRequest:
    return stage_request("talker", upstreams={"thinker"}, sampling=SamplingParams(temperature=0.0, **sampling))


def test_an_end_that_ends_nothing_is_not_said(talker: Talker) -> None:
    request = spoken(ignore_eos=True, suppress_tokens=[5])
    talker.begin(request)
    assert request.sampling.suppress_tokens == [5, 290, 292]
    plain = spoken(suppress_tokens=[5])
    talker.begin(plain)
    assert plain.sampling.suppress_tokens == [5]


def test_without_a_code_to_say_the_request_is_refused(talker: Talker) -> None:
    talker.begin(spoken(suppress_tokens=list(range(1, 300))))
    with pytest.raises(InvalidRequest, match="leaves none of the 290 codes") as caught:
        talker.begin(spoken(suppress_tokens=list(range(290))))
    assert caught.value.field == "sampling.talker.suppress_tokens"


def test_the_talker_makes_no_text(talker: Talker) -> None:
    with pytest.raises(StageFailed, match="not text"):
        talker.decode_text([1], skip_special_tokens=True)


def test_an_unknown_prompt_form_names_the_nearest(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'trained'"):
        Talker(context(tiny_dir, "talker", options={"prompt_form": "train"}))
