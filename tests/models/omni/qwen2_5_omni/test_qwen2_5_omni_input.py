"""The input stage gives what one plain call of the library's processor gives, and says what is wrong with a request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.media.audio import decode_audio
from segue.media.limits import MediaLimits
from segue.media.video import decode_video
from segue.messages.errors import ConfigError, InvalidRequest, NotFound, TooLarge
from segue.messages.request import ArrayInfo, ChatOptions, MediaPart, Message, Part, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.models.omni.qwen2_5_omni.input import InputProcessor
from segue.models.shared.omni.chat import audio_of_videos

if TYPE_CHECKING:
    from segue.models.omni.qwen2_5_omni.reference import Reference

LIMITS = MediaLimits()
QUESTION = TextPart("What is this?")


def context(directory: Path, **more: Any) -> LoadContext:
    return LoadContext(directory, "input", torch.device("cpu"), torch.float32, **more)


@pytest.fixture(scope="module")
def stage(tiny_dir: Path) -> InputProcessor:
    return InputProcessor(context(tiny_dir))


@pytest.fixture(scope="module")
def photo(assets: Path) -> MediaPart:
    return MediaPart("image", (assets / "photo.jpg").read_bytes(), field="messages[0].content[0]")


@pytest.fixture(scope="module")
def speech(assets: Path) -> MediaPart:
    return MediaPart("audio", (assets / "speech.wav").read_bytes(), field="messages[0].content[1]")


@pytest.fixture(scope="module")
def clip(assets: Path) -> MediaPart:
    return MediaPart("video", (assets / "video.mp4").read_bytes(), field="messages[0].content[2]")


def asked(*parts: Part, **more: Any) -> Request:
    return Request(request_id="r", messages=[Message("user", list(parts))], **more)


def entries(payload: Payload, kind: str) -> list[Payload]:
    return [entry for entry in payload["media"] if entry["kind"] == kind]


def assert_same(payload: Payload, plain: Any) -> None:
    """Every tensor of a plain processor call is in the payload, bit for bit."""
    left = set(plain) - {"attention_mask"}
    assert torch.equal(payload["token_ids"], plain["input_ids"][0])
    left -= {"input_ids"}
    if images := entries(payload, "image"):
        assert torch.equal(torch.cat([entry["pixel_values"] for entry in images]), plain["pixel_values"])
        assert [entry["grid_thw"] for entry in images] == plain["image_grid_thw"].tolist()
        left -= {"pixel_values", "image_grid_thw"}
    if videos := entries(payload, "video"):
        assert torch.equal(torch.cat([entry["pixel_values"] for entry in videos]), plain["pixel_values_videos"])
        assert [entry["grid_thw"] for entry in videos] == plain["video_grid_thw"].tolist()
        assert [entry["second_per_grid"] for entry in videos] == list(plain["video_second_per_grid"])
        left -= {"pixel_values_videos", "video_grid_thw", "video_second_per_grid"}
    if audios := entries(payload, "audio"):
        heard = zip(plain["input_features"], plain["feature_attention_mask"], strict=True)
        for entry, (features, mask) in zip(audios, heard, strict=True):
            assert torch.equal(entry["input_features"], features[:, mask.bool()])
        left -= {"input_features", "feature_attention_mask"}
    assert not left


def test_text(stage: InputProcessor, reference: Reference) -> None:
    payload = stage.process(asked(QUESTION))
    assert_same(payload, reference.inputs(QUESTION.text))
    assert payload["media"] == []


def test_a_conversation(stage: InputProcessor, reference: Reference) -> None:
    spoken = [("system", "Be brief."), ("user", "Grüße!\n\n  Two  spaces."), ("assistant", "Hello."), ("user", "日本")]
    request = Request(request_id="r", messages=[Message(role, [TextPart(text)]) for role, text in spoken])
    prompt = reference.prompt([{"role": role, "content": [{"type": "text", "text": text}]} for role, text in spoken])
    assert_same(stage.process(request), reference.process(prompt))


def test_photo(stage: InputProcessor, reference: Reference, photo: MediaPart, assets: Path) -> None:
    plain = reference.inputs(QUESTION.text, "image", images=[Image.open(assets / "photo.jpg")])
    assert_same(stage.process(asked(photo, QUESTION)), plain)


def test_speech(stage: InputProcessor, reference: Reference, speech: MediaPart) -> None:
    samples = decode_audio(speech, 16000, LIMITS)
    assert_same(stage.process(asked(speech, QUESTION)), reference.inputs(QUESTION.text, "audio", audio=[samples]))


def test_video(stage: InputProcessor, reference: Reference, clip: MediaPart) -> None:
    frames = decode_video(clip, 2.0, LIMITS).frames
    payload = stage.process(asked(clip, QUESTION))
    assert_same(payload, reference.inputs(QUESTION.text, "video", videos=[frames]))
    assert payload["use_audio_in_video"] is False


def test_video_with_its_audio(stage: InputProcessor, reference: Reference, clip: MediaPart) -> None:
    video = decode_video(clip, 2.0, LIMITS, audio_rate=16000)
    payload = stage.process(asked(clip, QUESTION, options={"use_audio_in_video": True}))
    plain = reference.inputs(
        QUESTION.text,
        "video",
        videos=[video.frames],
        audio=[video.audio],
        **audio_of_videos([0]),
    )
    assert_same(payload, plain)
    assert payload["use_audio_in_video"] is True


def test_everything_at_once(
    stage: InputProcessor, reference: Reference, photo: MediaPart, speech: MediaPart, clip: MediaPart, assets: Path
) -> None:
    red = np.zeros((40, 60, 3), np.uint8)
    red[..., 0] = 255
    image = MediaPart("image", red.tobytes(), ArrayInfo("uint8", red.shape))
    video, samples = decode_video(clip, 2.0, LIMITS, audio_rate=16000), decode_audio(speech, 16000, LIMITS)
    parts = [photo, speech, clip, TextPart("and"), image, QUESTION]
    kinds = [part.kind if isinstance(part, MediaPart) else part.text for part in parts]
    content = [
        {"type": kind} if kind in ("image", "audio", "video") else {"type": "text", "text": kind} for kind in kinds
    ]
    plain = reference.process(
        reference.prompt([{"role": "user", "content": content}]),
        images=[Image.open(assets / "photo.jpg"), Image.fromarray(red)],
        videos=[video.frames],
        audio=[samples, video.audio],
        **audio_of_videos([None, 0]),
    )
    payload = stage.process(asked(*parts, options={"use_audio_in_video": True}))
    assert_same(payload, plain)
    assert [entry["kind"] for entry in payload["media"]] == ["image", "audio", "video", "audio", "image"]


@pytest.mark.parametrize("samples", [16000, 15999, 16001, 1, 160 * 7 + 1, 400])
def test_audio_of_any_length(stage: InputProcessor, reference: Reference, samples: int) -> None:
    noise = (0.1 * np.random.default_rng(samples).standard_normal(samples)).astype(np.float32)
    part = MediaPart("audio", noise.tobytes(), ArrayInfo("float32", noise.shape), field="messages[0].content[0]")
    if samples < 321:
        with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\]: 1 samples are too short"):
            stage.process(asked(part))
        return
    assert_same(stage.process(asked(part, QUESTION)), reference.inputs(QUESTION.text, "audio", audio=[noise]))


def test_a_slow_video_tells_its_rate(stage: InputProcessor, reference: Reference) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (4, 56, 84, 3), dtype=np.uint8)
    part = MediaPart("video", frames.tobytes(), ArrayInfo("uint8", frames.shape, rate=1.0))
    plain = reference.inputs(QUESTION.text, "video", videos=[frames], videos_kwargs={"fps": 1.0})
    payload = stage.process(asked(part, QUESTION))
    assert_same(payload, plain)
    assert payload["media"][0]["second_per_grid"] == 2.0


def test_hash_is_of_the_content(stage: InputProcessor, photo: MediaPart, speech: MediaPart, assets: Path) -> None:
    def hash_of(part: MediaPart) -> bytes:
        return stage.process(asked(part))["media"][0]["hash"]

    pixels = np.array(Image.open(assets / "photo.jpg"))
    raw = MediaPart("image", pixels.tobytes(), ArrayInfo("uint8", pixels.shape))
    other = MediaPart("image", np.roll(pixels, 1).tobytes(), ArrayInfo("uint8", pixels.shape))
    assert len(hash_of(photo)) >= 16
    assert hash_of(photo) == hash_of(raw)
    assert len({hash_of(photo), hash_of(other), hash_of(speech)}) == 3


def test_hash_is_of_the_settings_too(stage: InputProcessor, tiny_dir: Path, tmp_path: Path, photo: MediaPart) -> None:
    shutil.copytree(tiny_dir, tmp_path / "model")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_mean": [0.5, 0.5, 0.5]}))
    other = InputProcessor(context(tmp_path / "model"))
    hashes = [each.process(asked(photo))["media"][0]["hash"] for each in (stage, other)]
    assert hashes[0] != hashes[1]


def test_given_ids_are_taken_as_they_are(stage: InputProcessor) -> None:
    payload = stage.process(Request(request_id="r", prompt_token_ids=[5, 6, 7]))
    assert payload["token_ids"].tolist() == [5, 6, 7]
    assert payload["media"] == []


@pytest.mark.parametrize("with_audio", [False, True])
def test_prompts_with_media_are_the_chat(
    stage: InputProcessor, photo: MediaPart, speech: MediaPart, clip: MediaPart, with_audio: bool
) -> None:
    """A prompt of text, of ids and of expanded ids, with its media kind by kind."""
    options = {"use_audio_in_video": with_audio}
    chat = asked(photo, speech, clip, QUESTION, photo, options=options)
    expected = stage.process(chat)
    assert stage._chat is not None
    text = stage._chat.text(chat.messages, chat.chat)
    media = [Message("user", [clip, photo, photo, speech])]
    for prompt in (
        {"prompt": text},
        {"prompt_token_ids": stage._chat.ids(text)},
        {"prompt_token_ids": expected["token_ids"].tolist()},
    ):
        made = stage.process(Request(request_id="r", messages=media, options=options, **prompt))
        assert torch.equal(made["token_ids"], expected["token_ids"])
        assert [entry["hash"] for entry in made["media"]] == [entry["hash"] for entry in expected["media"]]
        assert made["use_audio_in_video"] is with_audio
    ids = [*stage._chat.ids(text), stage._chat.placeholder_id("video")]
    with pytest.raises(InvalidRequest, match="2 placeholders for video, but multi_modal_data has 1 video: write"):
        stage.process(Request(request_id="r", messages=media, prompt_token_ids=ids))
    with pytest.raises(InvalidRequest, match="1 placeholder for video, but multi_modal_data has 0 video: send"):
        stage.process(Request(request_id="r", prompt_token_ids=ids[-1:]))


def bare(tiny_dir: Path, directory: Path, *left_out: str) -> InputProcessor:
    """The stage of a checkpoint without some of its files."""
    shutil.copytree(tiny_dir, directory, ignore=shutil.ignore_patterns("*.safetensors", *left_out))
    return InputProcessor(context(directory))


def test_a_bare_prompt_is_tokenized_as_it_is(stage: InputProcessor, reference: Reference) -> None:
    request = Request(request_id="r", prompt="<|im_start|>Tell me")
    ids = stage.process(request)["token_ids"].tolist()
    assert ids == reference.processor.tokenizer("<|im_start|>Tell me")["input_ids"]
    with pytest.raises(InvalidRequest, match="prompt has 1 placeholder for image, but multi_modal_data has 0 image"):
        stage.process(Request(request_id="r", prompt="a <|IMAGE|>"))
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        stage.process(Request(request_id="r", prompt=""))


def test_tokens_for_the_client_are_those_of_the_prompt(stage: InputProcessor, reference: Reference) -> None:
    tokenizer = reference.processor.tokenizer
    payload = stage.process(asked(QUESTION, modalities=["tokens"]))
    ids = payload["token_ids"].tolist()
    assert payload["tokens"] == {
        "token_ids": ids, "token_strs": tokenizer.convert_ids_to_tokens(ids), "text": tokenizer.decode(ids),
    }  # fmt: skip
    assert "tokens" not in stage.process(asked(QUESTION))
    assert stage.process(Request(request_id="r", prompt="", modalities=["tokens"]))["tokens"]["token_ids"] == []


def test_a_prompt_is_truncated_from_the_left(tiny_dir: Path) -> None:
    stage = InputProcessor(context(tiny_dir, max_model_len=10))

    def kept(count: int, ids: list[int]) -> list[int]:
        sampling = {"thinker": SamplingParams(truncate_prompt_tokens=count)}
        request = Request(request_id="r", prompt_token_ids=ids, sampling=sampling)
        return stage.process(request)["token_ids"].tolist()

    ids = list(range(5, 25))
    assert kept(4, ids) == ids[-4:]
    assert kept(-1, ids) == ids[-9:], "a context of 10 has room for 9 and one more"
    assert kept(4, [7, 8]) == [7, 8]
    for wrong in (0, 10, -2):
        with pytest.raises(InvalidRequest, match=r"truncate_prompt_tokens is .*; it must be from 1 to 9"):
            kept(wrong, ids)


def test_options_of_the_chat_reach_the_template(tiny_dir: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_dir, tmp_path / "m")
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:"
        "{{ m.tool_calls[0].function.name if m.tool_calls else m.content[0].text }};{% endfor %}"
        "{{ tools[0].function.name }};{{ mood }};{{ add_generation_prompt }}"
    )
    stage = InputProcessor(context(directory))
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
    chat = ChatOptions(
        tools=[{"type": "function", "function": {"name": "look"}}],
        add_generation_prompt=False,
        template_kwargs={"mood": "calm"},
    )
    messages = [
        Message("user", [QUESTION]),
        Message("assistant", [], {"tool_calls": [call]}),
        Message("tool", [TextPart("a cat")], {"tool_call_id": "1"}),
    ]
    payload = stage.process(Request(request_id="r", messages=messages, chat=chat, modalities=["tokens"]))
    assert payload["tokens"]["text"] == "user:What is this?;assistant:look;tool:a cat;look;calm;False"


def test_a_checkpoint_without_processor_takes_text(
    tiny_dir: Path, tmp_path: Path, reference: Reference, photo: MediaPart
) -> None:
    stage = bare(tiny_dir, tmp_path / "text", "preprocessor_config.json")
    assert_same(stage.process(asked(QUESTION)), reference.inputs(QUESTION.text))
    with pytest.raises(InvalidRequest, match="takes text, no image"):
        stage.process(asked(photo, QUESTION))


def test_a_checkpoint_without_tokenizer_takes_ids(tiny_dir: Path, tmp_path: Path) -> None:
    stage = bare(tiny_dir, tmp_path / "ids", "preprocessor_config.json", "tokenizer*", "vocab.json", "merges.txt")
    assert stage.process(Request(request_id="r", prompt_token_ids=[1, 2]))["token_ids"].tolist() == [1, 2]
    with pytest.raises(InvalidRequest, match="send prompt_token_ids"):
        stage.process(asked(QUESTION))


def test_a_checkpoint_without_template_says_so(tiny_dir: Path, tmp_path: Path) -> None:
    stage = bare(tiny_dir, tmp_path / "plain", "chat_template.json")
    with pytest.raises(InvalidRequest, match="no chat template"):
        stage.process(asked(QUESTION))


def test_what_the_template_refuses_is_the_clients_to_mend(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        InputProcessor(context(tmp_path / "model")).process(asked(QUESTION))


def test_a_broken_template_file_stops_the_start(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "model" / "chat_template.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"chat_template\.json"):
        InputProcessor(context(tmp_path / "model"))


@pytest.mark.parametrize(
    ("request_", "error", "field", "says"),
    [
        (Request(request_id="r"), InvalidRequest, "messages", "empty"),
        (Request(request_id="r", prompt_token_ids=[]), InvalidRequest, "prompt_token_ids", "empty"),
        (Request(request_id="r", prompt_token_ids=[1, 9999]), InvalidRequest, "prompt_token_ids[1]", "from 0 to 671"),
        (Request(request_id="r", prompt_token_ids=[-1]), InvalidRequest, "prompt_token_ids[0]", "-1"),
        (asked(QUESTION, prompt_token_ids=[1]), InvalidRequest, "prompt_token_ids", "not both"),
        (asked(QUESTION, voice="Chelsea"), NotFound, "voice", "did you mean 'Chelsie'"),
        (
            asked(QUESTION, options={"use_audio_in_video": 1}),
            InvalidRequest,
            "options.use_audio_in_video",
            "true or false",
        ),
        (asked(TextPart("a <|IMAGE|> b")), InvalidRequest, "messages[0].content[0]", "stands for image"),
        (
            Request(request_id="r", messages=[Message("usr", [QUESTION])]),
            InvalidRequest,
            "messages[0].role",
            "did you mean 'user'",
        ),
        (asked(MediaPart("image", b"no", field="here")), InvalidRequest, "here", "not a readable image"),
        (asked(MediaPart("audio", b"no", field="here")), InvalidRequest, "here", "not a readable audio"),
        (asked(MediaPart("video", b"no", field="here")), InvalidRequest, "here", "not a readable video"),
        (
            asked(MediaPart("image", bytes(3 * 201), ArrayInfo("uint8", (1, 201, 3)), field="here")),
            InvalidRequest,
            "here",
            "at most 200 times",
        ),
        (asked(*[MediaPart("image", b"") for _ in range(65)]), InvalidRequest, "messages", "max_media_parts"),
    ],
)
def test_wrong_requests_are_named(
    stage: InputProcessor, request_: Request, error: type[InvalidRequest], field: str, says: str
) -> None:
    with pytest.raises(error) as caught:
        stage.process(request_)
    assert says in caught.value.message
    assert caught.value.field == field


def test_over_long_prompts_are_counted(tiny_dir: Path, photo: MediaPart) -> None:
    stage = InputProcessor(context(tiny_dir, max_model_len=100))
    with pytest.raises(InvalidRequest, match=r"has 150 tokens \(117 of them image\); the context is 100") as caught:
        stage.process(asked(photo, QUESTION))
    assert caught.value.field == "messages"
    with pytest.raises(InvalidRequest, match="at most 99"):
        stage.process(Request(request_id="r", prompt_token_ids=[1] * 100))
    assert len(stage.process(Request(request_id="r", prompt_token_ids=[1] * 99))["token_ids"]) == 99


def test_limits_of_the_deployment(tiny_dir: Path, photo: MediaPart) -> None:
    stage = InputProcessor(context(tiny_dir, options={"limits": {"max_image_pixels": 100}}))
    with pytest.raises(TooLarge, match="max_image_pixels"):
        stage.process(asked(photo))
    with pytest.raises(ConfigError, match="did you mean"):
        InputProcessor(context(tiny_dir, options={"limits": {"max_image_pixel": 100}}))


def test_videos_with_and_without_audio_do_not_mix(stage: InputProcessor, clip: MediaPart) -> None:
    silent = np.zeros((2, 56, 56, 3), np.uint8)
    mute = MediaPart("video", silent.tobytes(), ArrayInfo("uint8", silent.shape), field="messages[0].content[1]")
    with pytest.raises(InvalidRequest, match="no audio track") as caught:
        stage.process(asked(clip, mute, options={"use_audio_in_video": True}))
    assert caught.value.field == mute.field
    assert stage.process(asked(mute, options={"use_audio_in_video": True}))["use_audio_in_video"] is False


def test_one_wrong_request_spoils_no_other(stage: InputProcessor) -> None:
    def stage_request(name: str, request: Request) -> StageRequest:
        nothing: frozenset[str] = frozenset()
        return StageRequest(name, "input", request, SamplingParams(), 0, nothing, frozenset({"thinker"}), nothing)

    works = []
    for name, request in (("good", asked(QUESTION)), ("bad", Request(request_id="bad"))):
        state, items = stage.begin(stage_request(name, request))
        assert [item.last for item in items] == [True]
        works += items
        stage.end(state)
    assert len({work.bucket for work in works}) == 2
    good, bad = stage.run(works)
    assert good.error is None
    assert good.payload is not None
    assert isinstance(bad.error, InvalidRequest)
    assert bad.payload is None
