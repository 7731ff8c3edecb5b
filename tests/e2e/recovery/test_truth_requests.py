"""Ways to say the same request, and ways for it to end: the answers stay those of transformers."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from truth_system import BY_NAME, FILES, LIMITS, WITHIN, System, Truth, assert_equals, assert_same, longer, spans

from segue import Omni
from segue.media.audio import decode_audio
from segue.media.video import decode_video
from segue.messages.request import MediaPart
from segue.messages.sampling import SamplingParams
from selection import daily

TEXT = BY_NAME["text"]
MIME = {"image": "image/jpeg", "audio": "audio/wav", "video": "video/mp4"}


def samples_of(path: Path) -> np.ndarray:
    return decode_audio(MediaPart("audio", path.read_bytes()), 16000, LIMITS)


def frames_of(path: Path) -> np.ndarray:
    return decode_video(MediaPart("video", path.read_bytes()), 2.0, LIMITS).frames


def data_url(path: Path, kind: str) -> dict[str, Any]:
    url = f"data:{MIME[kind]};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def input_audio(path: Path) -> dict[str, Any]:
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


FORMS: list[tuple[str, str, Callable[[Path], dict[str, Any]]]] = [
    ("image", "Path", lambda path: {"type": "image", "image": path}),
    ("image", "bytes", lambda path: {"type": "image", "image": path.read_bytes()}),
    ("image", "PIL", lambda path: {"type": "image", "image": Image.open(path)}),
    ("image", "array", lambda path: {"type": "image", "image": np.asarray(Image.open(path).convert("RGB"))}),
    ("image", "data URL", lambda path: data_url(path, "image")),
    ("image", "path in URL", lambda path: {"type": "image_url", "image_url": {"url": str(path)}}),
    ("audio", "Path", lambda path: {"type": "audio", "audio": path}),
    ("audio", "bytes", lambda path: {"type": "audio", "audio": path.read_bytes()}),
    ("audio", "bare array", lambda path: {"type": "audio", "audio": samples_of(path)}),
    ("audio", "array and rate", lambda path: {"type": "audio", "audio": (samples_of(path), 16000)}),
    ("audio", "input_audio", input_audio),
    ("audio", "data URL", lambda path: data_url(path, "audio")),
    ("video", "Path", lambda path: {"type": "video", "video": path}),
    ("video", "bytes", lambda path: {"type": "video", "video": path.read_bytes()}),
    ("video", "bare frames", lambda path: {"type": "video", "video": frames_of(path)}),
    ("video", "list of images", lambda path: {"type": "video", "video": list(map(Image.fromarray, frames_of(path)))}),
    ("video", "frames and rate", lambda path: {"type": "video", "video": (frames_of(path), 2.0)}),
    ("video", "data URL", lambda path: data_url(path, "video")),
]


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_a_medium_in_every_form(system: System, truth: Truth, assets: Path, kind: str) -> None:
    case = BY_NAME[kind]
    prompts = []
    for of, _, form in FORMS:
        if of == kind:
            prompt = case.prompt(assets)
            prompt["messages"][0]["content"][0] = form(assets / FILES[kind])
            prompts.append(prompt)
    assert len(prompts) > 5
    for output in system.ask(*prompts):
        truth.check(output, case)


def test_several_media_of_one_request(system: System, truth: Truth, assets: Path) -> None:
    """They share calls of the encoder, and come out in their order."""
    photo = Image.open(assets / FILES["image"])
    images = [photo, photo.resize((112, 84)), photo.rotate(180).resize((140, 112))]
    kinds = ("image", "image", "audio", "image")
    samples = samples_of(assets / FILES["audio"])
    inputs = truth.reference.inputs("Which is which?", *kinds, images=images, audio=[samples])
    reply = truth.reference.generate(inputs, max_tokens=24, max_codes=40, noise_seed=3)
    shown = iter(images)
    content = [{"type": kind, kind: samples if kind == "audio" else next(shown)} for kind in kinds] + [
        {"type": "text", "text": "Which is which?"}
    ]
    prompt = longer(TEXT, seed=3, tokens=24, codes=40).prompt(assets)
    prompt["messages"] = [{"role": "user", "content": content}]
    [output] = system.ask(prompt)
    assert_equals(output, reply, truth.reference, within=WITHIN[1])


def test_a_conversation(system: System, truth: Truth, assets: Path) -> None:
    spoken = [("system", "Be brief."), ("user", "What is the sea?"), ("assistant", "Water."), ("user", "And a hill?")]
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in spoken]
    inputs = truth.reference.process(truth.reference.prompt(messages))
    reply = truth.reference.generate(inputs, max_tokens=24, max_codes=40, noise_seed=3)
    prompt = longer(TEXT, seed=3, tokens=24, codes=40).prompt(assets)
    prompt["messages"] = [{"role": role, "content": text} for role, text in spoken]
    [output] = system.ask(prompt)
    assert_equals(output, reply, truth.reference, within=WITHIN[1])


def ids_prompt(truth: Truth, assets: Path) -> dict[str, Any]:
    prompt = TEXT.prompt(assets)
    del prompt["messages"]
    return {**prompt, "prompt_token_ids": truth.inputs(TEXT)["input_ids"][0].tolist()}


def test_prompt_token_ids(system: System, truth: Truth, assets: Path) -> None:
    [output] = system.ask(ids_prompt(truth, assets))
    truth.check(output, TEXT)


# --- endings ---------------------------------------------------------------------------------------------------------


def end_token(truth: Truth) -> int:
    reply = truth.of(longer(BY_NAME["image"], tokens=60))
    assert len(reply.token_ids) < 60
    return reply.token_ids[-1]


def assert_silent(output: Any) -> None:
    assert output.audio is not None
    assert output.audio.samples.shape == (0,)
    assert output.metrics.attempts == 1


def test_a_reply_of_one_token_ends_in_silence(system: System, truth: Truth, assets: Path) -> None:
    [output] = system.ask(longer(TEXT, tokens=1).prompt(assets))
    assert output.token_ids == {"thinker": truth.of(TEXT).token_ids[:1], "talker": []}
    assert output.finish_reason == "length"
    assert_silent(output)
    assert spans(output) == {"input", "thinker", "talker", "vocoder"}
    assert output.usage.completion_modalities == {"text": 1, "audio": 0}


def test_a_reply_that_ends_at_once_ends_in_silence(system: System, truth: Truth, assets: Path) -> None:
    end = end_token(truth)
    sampling = {"thinker": SamplingParams(temperature=0, max_tokens=20, logit_bias={end: 100.0})}
    outputs = system.ask(
        TEXT.prompt(assets, sampling=sampling), TEXT.prompt(assets), BY_NAME["image"].prompt(assets, sampling=sampling)
    )
    for output in (outputs[0], outputs[2]):
        assert output.token_ids == {"thinker": [end], "talker": []}
        assert (output.text, output.finish_reason) == ("", "stop")
        assert_silent(output)
    truth.check(outputs[1], TEXT)


def test_a_talker_that_ends_at_once_says_nothing(system: System, truth: Truth, assets: Path) -> None:
    end = truth.reference.model.config.talker_config.tts_codec_end_token_id
    sampling = {"talker": SamplingParams(temperature=0, max_tokens=20, logit_bias={end: 100.0})}
    [output] = system.ask(TEXT.prompt(assets, sampling=sampling))
    assert output.token_ids == {"thinker": truth.of(TEXT).token_ids, "talker": [end]}
    assert_silent(output)


@pytest.mark.parametrize("codes", daily((1, 2, 12, 13), (1, 13)))
def test_a_few_codes(system: System, truth: Truth, assets: Path, codes: int) -> None:
    case = longer(TEXT, codes=codes)
    [output] = system.ask(case.prompt(assets))
    truth.check(output, case)


def test_the_length_ends_it(system: System, truth: Truth, assets: Path) -> None:
    for tokens in (2, 3, 9):
        case = longer(TEXT, tokens=tokens)
        [output] = system.ask(case.prompt(assets))
        assert output.finish_reason == "length"
        truth.check(output, case)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_text_and_speech(system: System, truth: Truth, assets: Path, include: bool) -> None:
    whole = truth.of(TEXT)
    decode = truth.reference.processor.tokenizer.decode
    text = decode(whole.token_ids, skip_special_tokens=True)
    at = len(text) // 2
    stop = text[at : at + 3]
    at = text.index(stop)
    sampling = {
        "thinker": SamplingParams(
            temperature=0, max_tokens=TEXT.tokens, stop=["never in it", stop], include_stop_str_in_output=include
        )
    }
    [output] = system.ask(TEXT.prompt(assets, sampling=sampling))
    assert output.text == text[: at + 3 if include else at]
    assert output.finish_reason == "stop"
    used = output.token_ids["thinker"]
    assert used == whole.token_ids[: len(used)]
    assert stop in decode(used, skip_special_tokens=True)
    assert stop not in decode(used[:-1], skip_special_tokens=True)
    # the talker speaks what was generated, as after a limit of so many tokens
    assert output.token_ids["talker"][: TEXT.codes] == truth.of(longer(TEXT, tokens=len(used))).codes + (
        output.token_ids["talker"][-1:] if truth.of(longer(TEXT, tokens=len(used))).speech_ended else []
    )


def test_a_stop_token_ends_text_and_speech(system: System, truth: Truth, assets: Path) -> None:
    whole = truth.of(TEXT)
    token = whole.token_ids[9]
    count = whole.token_ids.index(token) + 1
    sampling = {"thinker": SamplingParams(temperature=0, max_tokens=TEXT.tokens, stop_token_ids=[token])}
    [output] = system.ask(TEXT.prompt(assets, sampling=sampling))
    assert output.finish_reason == "stop"
    assert output.token_ids["thinker"] == whole.token_ids[:count]
    short = truth.of(longer(TEXT, tokens=count))
    assert output.token_ids["talker"][: len(short.codes)] == short.codes
    assert len(output.token_ids["talker"]) == len(short.codes) + short.speech_ended


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"min_tokens": 30}, {"min_new_tokens": 30}),
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        pytest.param({"suppress_tokens": "first"}, {"suppress_tokens": "first"}, marks=pytest.mark.nightly),
        ({"logit_bias": "first"}, {"sequence_bias": "first"}),
    ],
    ids=["min_tokens", "repetition_penalty", "suppress_tokens", "logit_bias"],
)
def test_fields_mean_what_they_mean_to_generate(
    system: System, truth: Truth, assets: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    case = longer(BY_NAME["image"], tokens=40)
    plain = truth.of(case)
    if ours.get("suppress_tokens"):
        ours = theirs = {"suppress_tokens": plain.token_ids[:4]}
    if ours.get("logit_bias"):
        ours = {"logit_bias": dict.fromkeys(plain.token_ids[:4], -3.5)}
        theirs = {"sequence_bias": {(token,): -3.5 for token in plain.token_ids[:4]}}
    reply = truth.fresh(case, **{f"thinker_{name}": value for name, value in theirs.items()})
    assert reply.token_ids != plain.token_ids
    sampling = {"thinker": SamplingParams(temperature=0, max_tokens=case.tokens, **ours)}
    [output] = system.ask(case.prompt(assets, sampling=sampling))
    assert_equals(output, reply, truth.reference, within=WITHIN[1])
    assert output.finish_reason == ("length" if len(reply.token_ids) == case.tokens else "stop")


def test_ignore_eos_goes_on_to_the_length(system: System, truth: Truth, assets: Path) -> None:
    case = longer(BY_NAME["image"], tokens=50)
    plain = truth.of(case).token_ids
    assert len(plain) < 50
    sampling = {"thinker": SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)}
    [output] = system.ask(case.prompt(assets, sampling=sampling))
    assert len(output.token_ids["thinker"]) == 50
    assert output.token_ids["thinker"][: len(plain)] == plain
    assert output.finish_reason == "length"


def test_the_synchronous_face(tiny_dir: Path, truth: Truth, assets: Path) -> None:
    """`Omni` as the README has it: a batch, shared settings, a bare `SamplingParams` for the main stage."""
    cases = [TEXT, longer(BY_NAME["image"], seed=TEXT.seed)]
    with Omni(tiny_dir, progress=False, dtype="float32") as omni:
        outputs = omni.generate(
            [{"messages": case.prompt(assets)["messages"]} for case in cases],
            modalities=["text", "audio"],
            voice="Chelsie",
            seed=TEXT.seed,
            sampling={
                "thinker": SamplingParams(temperature=0, max_tokens=TEXT.tokens),
                "talker": SamplingParams(temperature=0, max_tokens=TEXT.codes),
            },
        )
        for output, case in zip(outputs, cases, strict=True):
            truth.check(output, case)
        [bare] = omni.generate(TEXT.text, sampling=SamplingParams(temperature=0, max_tokens=5))
        assert bare.token_ids == {"thinker": truth.of(TEXT).token_ids[:5]}
        [again] = omni.generate(TEXT.text, sampling=SamplingParams(temperature=0, max_tokens=5))
        assert_same(again, bare)
