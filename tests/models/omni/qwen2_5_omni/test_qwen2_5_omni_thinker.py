"""The thinker: its prompts, and the same reply as `generate` under every condition of serving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen2_5_omni_family import (
    CASES,
    THINKER_TOKENS,
    Case,
    context,
    decoder_in,
    encoded,
    input_payload,
    library_model,
    processed,
    reference_answer,
    sent,
    stage_request,
    tight,
)

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import Prompt
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import Payload, StageOutput
from segue.messages.errors import InvalidRequest, StageFailed
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.omni.qwen2_5_omni.encoder import Encoder
from segue.models.omni.qwen2_5_omni.thinker import Thinker
from segue.models.shared.omni.prompt import MEDIA_ROWS

NAMES = [case.name for case in CASES]
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def encoder(tiny_dir: Path) -> Encoder:
    return Encoder(context(tiny_dir, "encoder"))


@pytest.fixture(scope="module")
def thinker(tiny_dir: Path) -> Thinker:
    return Thinker(context(tiny_dir, "thinker"))


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> dict[str, list[int]]:
    """The reference's replies."""
    return {case.name: reference_answer(tiny_dir, processed(tiny_dir, case), case)[0] for case in CASES}


def feed_prompt(thinker: Thinker, payload: Payload, chunks: list[tuple[Payload, bool]]) -> Prompt | None:
    upstreams = {"input", "encoder"} if chunks else {"input"}
    state = thinker.begin(stage_request("thinker", upstreams=upstreams))
    request = stage_request("input", upstreams=set())
    facts = sent("input", "thinker", request, StageOutput("r", payload=payload, finished=True))
    fed = thinker.feed(state, "input", facts, final=True)
    for chunk, final in chunks:
        assert fed.prompt is None
        fed = thinker.feed(state, "encoder", chunk, final=final)
    return fed.prompt


def prompt_of(tiny_dir: Path, thinker: Thinker, encoder: Encoder, case: Case) -> Prompt:
    payload = input_payload(processed(tiny_dir, case), case)
    prompt = feed_prompt(thinker, payload, encoded(encoder, payload) if payload["media"] else [])
    assert prompt is not None
    return prompt


class Run:
    """Requests through a thinker's engine, without a talker behind it."""

    def __init__(self, thinker: Thinker, **config: Any) -> None:
        self.thinker = thinker
        self.engine = AutoregressiveEngine(thinker, AutoregressiveConfig(**{"num_blocks": 400, **config}))

    def __call__(self, tiny_dir: Path, encoder: Encoder, cases: list[Case]) -> dict[str, list[int]]:
        for case in cases:
            self._add(case.name, input_payload(processed(tiny_dir, case), case), encoder)
        replies: dict[str, list[int]] = {case.name: [] for case in cases}
        self.cached = dict.fromkeys(replies, 0)
        while self.engine.has_work():
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                replies[output.request_id] += output.token_ids
                self.cached[output.request_id] += output.cached_tokens
        return replies

    def _add(self, name: str, payload: Payload, encoder: Encoder) -> None:
        sampling = SamplingParams(max_tokens=THINKER_TOKENS).over(self.thinker.default_sampling).over(FALLBACK)
        upstreams = {"input", "encoder"} if payload["media"] else {"input"}
        request = stage_request("thinker", request_id=name, upstreams=upstreams, sampling=sampling)
        self.engine.add(request)
        facts = sent("input", "thinker", request, StageOutput(name, payload=payload))
        self.engine.feed(name, "input", facts, final=True)
        for chunk, final in encoded(encoder, payload) if payload["media"] else ():
            self.engine.feed(name, "encoder", chunk, final=final)


# --- replies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_reply_is_the_references(
    tiny_dir: Path, thinker: Thinker, encoder: Encoder, expected: dict[str, list[int]], name: str
) -> None:
    assert Run(thinker)(tiny_dir, encoder, [BY_NAME[name]]) == {name: expected[name]}


def test_replies_depend_on_the_prompt_and_some_end_by_themselves(expected: dict[str, list[int]]) -> None:
    assert len({tuple(reply) for reply in expected.values()}) == len(expected)
    assert any(len(reply) < THINKER_TOKENS for reply in expected.values())


def test_in_a_batch(tiny_dir: Path, thinker: Thinker, encoder: Encoder, expected: dict[str, list[int]]) -> None:
    assert Run(thinker)(tiny_dir, encoder, list(CASES)) == expected


def test_with_chunked_prefill(
    tiny_dir: Path, thinker: Thinker, encoder: Encoder, expected: dict[str, list[int]]
) -> None:
    assert Run(thinker, max_tokens_per_step=37)(tiny_dir, encoder, list(CASES)) == expected


def test_after_a_prefix_hit(tiny_dir: Path, thinker: Thinker, encoder: Encoder, expected: dict[str, list[int]]) -> None:
    run = Run(thinker)
    run(tiny_dir, encoder, list(CASES))
    assert run(tiny_dir, encoder, list(CASES)) == expected
    assert all(run.cached.values())


def test_after_preemption(tiny_dir: Path, thinker: Thinker, encoder: Encoder, expected: dict[str, list[int]]) -> None:
    cases = [BY_NAME[name] for name in ("text", "image", "audio")]
    run = Run(thinker, prefix_caching=False, **tight(tiny_dir, cases))
    assert run(tiny_dir, encoder, cases) == {case.name: expected[case.name] for case in cases}
    assert run.engine.stats()["preemptions_total"] > 0


def test_another_image_is_no_prefix_hit(
    tiny_dir: Path, thinker: Thinker, encoder: Encoder, expected: dict[str, list[int]]
) -> None:
    image = BY_NAME["image"]
    other = replace(image, images=(4,))  # of the same size: the same ids
    first, second = (processed(tiny_dir, case) for case in (image, other))
    assert torch.equal(first["input_ids"], second["input_ids"])
    run = Run(thinker)
    run(tiny_dir, encoder, [image])
    reply = run(tiny_dir, encoder, [other])[image.name]
    assert run.cached[image.name] < 16 + 5  # no block that holds a row of the image
    assert reply == reference_answer(tiny_dir, second, other)[0]
    assert reply != expected[image.name]


def test_one_weight_changed_changes_the_reply(tiny_dir: Path, encoder: Encoder, expected: dict[str, list[int]]) -> None:
    spoilt = Thinker(context(tiny_dir, "thinker"))
    with torch.no_grad():
        spoilt.library_decoder.layers[1].input_layernorm.weight[0] += 1
    assert Run(spoilt)(tiny_dir, encoder, list(CASES)) != expected


# --- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_and_positions_are_the_librarys(
    tiny_dir: Path, thinker: Thinker, encoder: Encoder, name: str
) -> None:
    case = BY_NAME[name]
    inputs = processed(tiny_dir, case)
    seen: dict[str, torch.Tensor] = {}
    model = library_model(tiny_dir).thinker

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.setdefault("embeds", kwargs["inputs_embeds"][0].clone())
        seen.setdefault("positions", kwargs["position_ids"][-3:, 0].clone())

    with decoder_in(model).register_forward_pre_hook(note, with_kwargs=True):
        model.generate(**inputs, max_new_tokens=1, use_audio_in_video=case.use_audio_in_video)
    prompt = prompt_of(tiny_dir, thinker, encoder, case)
    embeds = prompt.embeds if prompt.embeds is not None else thinker.embed(torch.tensor(prompt.token_ids), None)
    assert prompt.token_ids == inputs["input_ids"][0].tolist()
    torch.testing.assert_close(embeds, seen["embeds"], atol=1e-5, rtol=0)
    assert prompt.positions is not None
    assert torch.equal(prompt.positions, seen["positions"])
    assert prompt.position_delta == int(prompt.positions.max()) + 1 - len(prompt.token_ids)


def test_text_is_embedded_by_the_engine_and_shared_by_its_ids(
    tiny_dir: Path, thinker: Thinker, encoder: Encoder
) -> None:
    prompt = prompt_of(tiny_dir, thinker, encoder, BY_NAME["text"])
    assert prompt.embeds is None
    assert prompt.identity is None
    assert prompt.modality_tokens == {"text": len(prompt.token_ids)}


def test_what_each_token_of_a_mixed_prompt_is(tiny_dir: Path, thinker: Thinker, encoder: Encoder) -> None:
    case = BY_NAME["mixed"]
    prompt = prompt_of(tiny_dir, thinker, encoder, case)
    again = prompt_of(tiny_dir, thinker, encoder, case)
    assert prompt.identity is not None
    assert list(prompt.identity) == list(again.identity or ())
    media = prompt.extras[MEDIA_ROWS].tolist()
    assert [isinstance(what, bytes) for what in prompt.identity] == media
    named = [what for what in prompt.identity if isinstance(what, bytes)]
    assert len(named) == len(set(named)), "two rows of media pass for the same"
    assert [what for what in prompt.identity if isinstance(what, int)] == [
        token for token, is_media in zip(prompt.token_ids, media, strict=True) if not is_media
    ]
    counts = prompt.modality_tokens
    assert sum(counts.values()) == len(prompt.token_ids)
    assert counts["text"] == media.count(False)
    assert {"image", "audio", "video"} < counts.keys()


def test_the_same_clip_at_another_pace_is_something_else(tiny_dir: Path, thinker: Thinker, encoder: Encoder) -> None:
    case = BY_NAME["video"]
    payload = input_payload(processed(tiny_dir, case), case)
    slower = {**payload, "media": [{**payload["media"][0], "second_per_grid": 7.0}]}
    first, second = (feed_prompt(thinker, p, encoded(encoder, p)) for p in (payload, slower))
    assert first is not None
    assert second is not None
    assert first.identity != second.identity
    assert first.positions is not None
    assert second.positions is not None
    assert not torch.equal(first.positions, second.positions)


def test_the_encoder_may_come_first(tiny_dir: Path, thinker: Thinker, encoder: Encoder) -> None:
    case = BY_NAME["mixed"]
    payload = input_payload(processed(tiny_dir, case), case)
    state = thinker.begin(stage_request("thinker", upstreams={"input", "encoder"}))
    for chunk, final in encoded(encoder, payload):
        assert thinker.feed(state, "encoder", chunk, final=final).prompt is None
    facts = sent("input", "thinker", stage_request("input", upstreams=set()), StageOutput("r", payload=payload))
    fed = thinker.feed(state, "input", facts, final=True)
    assert fed.prompt is not None
    assert fed.prompt.token_ids == payload["token_ids"].tolist()


def test_placeholders_that_are_no_media_are_text(thinker: Thinker) -> None:
    payload = {"token_ids": torch.tensor([1, 652, 652, 2]), "media": [], "use_audio_in_video": False}
    prompt = feed_prompt(thinker, payload, [])
    assert prompt is not None
    assert prompt.modality_tokens == {"text": 4}
    assert prompt.embeds is None


# --- bad prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [672, -1, 10**9])
def test_ids_outside_the_vocabulary(thinker: Thinker, wrong: int) -> None:
    payload = {"token_ids": torch.tensor([1, wrong]), "media": []}
    with pytest.raises(InvalidRequest, match=f"has {wrong}; this model's ids are 0 to 671") as caught:
        feed_prompt(thinker, payload, [])
    assert caught.value.field == "prompt_token_ids"


def test_more_placeholders_than_rows(tiny_dir: Path, thinker: Thinker, encoder: Encoder) -> None:
    case = BY_NAME["image"]
    payload = input_payload(processed(tiny_dir, case), case)
    image = int(payload["token_ids"].mode().values)
    payload["token_ids"] = torch.cat([payload["token_ids"], torch.tensor([image])])
    with pytest.raises(InvalidRequest, match="the prompt has 26 image placeholder tokens; its image content has 25"):
        feed_prompt(thinker, payload, encoded(encoder, payload))


def test_rows_without_a_frame_of_tokens(tiny_dir: Path, thinker: Thinker, encoder: Encoder) -> None:
    case = BY_NAME["image"]
    payload = input_payload(processed(tiny_dir, case), case)
    image = int(payload["token_ids"].mode().values)
    start = thinker._positions._index.config.vision_start_token_id
    payload["token_ids"] = torch.tensor([image] * 25 + [start])  # a start at the very end: the library looks behind it
    with pytest.raises(InvalidRequest, match="do not match its media"):
        feed_prompt(thinker, payload, encoded(encoder, payload))


def test_rows_of_other_media_than_the_prompts(tiny_dir: Path, thinker: Thinker, encoder: Encoder) -> None:
    case = BY_NAME["mixed"]
    payload = input_payload(processed(tiny_dir, case), case)
    chunks = encoded(encoder, payload)
    with pytest.raises(StageFailed, match="the prompt has 5 media"):
        feed_prompt(thinker, payload, [*chunks[:3], (chunks[3][0], True)])


# --- defaults --------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_generate(tiny_dir: Path, thinker: Thinker) -> None:
    generation = library_model(tiny_dir).thinker.generation_config
    assert thinker.end_token_ids == {generation.eos_token_id}
    assert thinker.default_sampling.temperature == 0.0
    assert not generation.do_sample
    assert thinker.default_sampling.max_tokens == 1024


def test_text_of_a_reply(tiny_dir: Path, thinker: Thinker) -> None:
    ids = processed(tiny_dir, BY_NAME["text"])["input_ids"][0].tolist()
    assert thinker.decode_text(ids, skip_special_tokens=False).startswith("<|im_start|>user\nwrite a few")
    assert thinker.decode_text(ids, skip_special_tokens=True).startswith("user\nwrite a few")


def test_without_a_tokenizer_there_is_no_text(tiny_dir: Path, tmp_path: Path) -> None:
    for path in tiny_dir.iterdir():
        if not path.name.startswith(("tokenizer", "vocab", "merges", "added", "special")):
            (tmp_path / path.name).symlink_to(path)
    bare = Thinker(context(tmp_path, "thinker"))
    assert bare.decode_text([1, 2, 3], skip_special_tokens=True) == ""
    assert bare.end_token_ids


def test_a_checkpoint_that_does_not_speak_captures_nothing(tiny_dir: Path, tmp_path: Path) -> None:
    for path in tiny_dir.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    text = (tiny_dir / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"enable_audio_output": true', '"enable_audio_output": false'))
    assert Thinker(context(tmp_path, "thinker")).kv.capture_width == 0
