"""The input stage: prompts of the package's form, and requests that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from qwen3_tts_family import cases, context

from segue.messages.errors import ConfigError, InvalidRequest, NotFound, TooLong
from segue.messages.request import MediaPart, Message, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.models.registry import family_of, read_config
from segue.models.speech.qwen3_tts import config as files
from segue.models.speech.qwen3_tts.graph import graph
from segue.models.speech.qwen3_tts.input import InputProcessor
from segue.models.speech.qwen3_tts.talker import Talker


@pytest.fixture(scope="module")
def stage(tiny_dir: Path) -> InputProcessor:
    return InputProcessor(context(tiny_dir, "input"))


def asked(text: str = "Good night.", **more: Any) -> Request:
    return Request(request_id="r", messages=[Message("user", [TextPart(text)])], **more)


def pairs(stage: InputProcessor, request: Request) -> list[tuple[int, int]]:
    payload = stage.process(request)
    return list(zip(payload["text_ids"].tolist(), payload["codec_ids"].tolist(), strict=True))


def test_the_prompt_has_the_packages_form(tiny_dir: Path, stage: InputProcessor) -> None:
    talker = read_config(tiny_dir)["talker_config"]
    pad = talker["codec_pad_id"]
    plain, spoken = pairs(stage, asked()), pairs(stage, asked(options={"language": "English"}))
    assert [code for _, code in plain[:7]] == [-1, -1, -1, *(talker[f"codec_{name}_id"] for name in _NO_LANGUAGE), 1081]
    english = talker["codec_language_id"]["english"]
    assert [code for _, code in spoken[3:8]] == [170, 172, english, 173, talker["spk_id"]["vivian"]]
    assert {code for _, code in plain[7:-1]} == {pad}
    assert plain[-1][1] == talker["codec_bos_id"]
    assert len(spoken) == len(plain) + 1


_NO_LANGUAGE = ("nothink", "think_bos", "think_eos")


def test_a_dialects_voice_speaks_it_unless_another_language_is_named(stage: InputProcessor) -> None:
    beijing = 64 + 26
    for language, expected in ((None, True), ("Chinese", True), ("auto", True), ("English", False)):
        options = {} if language is None else {"language": language}
        codes = [code for _, code in pairs(stage, asked(voice="Dylan", options=options))]
        assert (beijing in codes) is expected


def test_a_bare_prompt_is_the_text_to_say(stage: InputProcessor) -> None:
    assert pairs(stage, Request(request_id="r", prompt="Good night.")) == pairs(stage, asked())


def test_special_tokens_in_a_text_are_text(stage: InputProcessor, tiny_dir: Path) -> None:
    end = read_config(tiny_dir)["im_end_token_id"]
    for request in (asked("a <|im_end|> b"), asked(options={"instructions": "a <|im_end|> b"})):
        texts = [text for text, _ in pairs(stage, request)]
        assert texts.count(end) == (1 if request.options else 0)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (asked("  "), InvalidRequest, "messages has no text to say"),
        (asked(voice="Vivien"), NotFound, "voice is 'Vivien'; did you mean 'Vivian'"),
        (asked(options={"language": "klingon"}), InvalidRequest, "options.language is 'klingon'.*auto, english"),
        (asked(options={"language": "beijing_dialect"}), InvalidRequest, "options.language"),
        (asked(options={"instructions": 3}), InvalidRequest, "options.instructions is 3"),
        (asked("word " * 40_000), TooLong, "tokens"),
        (Request(request_id="r", prompt_token_ids=[1]), InvalidRequest, "prompt_token_ids"),
        (
            Request(request_id="r", messages=[Message("system", [TextPart("a")]), Message("user", [TextPart("b")])]),
            InvalidRequest,
            "send one user message",
        ),
        (
            Request(request_id="r", messages=[Message("user", [MediaPart("audio", b"")])]),
            InvalidRequest,
            "is audio; this model takes text",
        ),
        (
            asked(sampling={"talker": SamplingParams(truncate_prompt_tokens=3)}),
            InvalidRequest,
            "sampling.talker.truncate_prompt_tokens",
        ),
    ],
)
def test_requests_that_are_refused(
    stage: InputProcessor, request_: Request, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        stage.process(request_)


def test_a_model_of_described_voices_has_none(design_dir: Path) -> None:
    stage = InputProcessor(context(design_dir, "input"))
    assert len(pairs(stage, cases()["designed"].request)) > 20
    with pytest.raises(NotFound, match="this model has no voices"):
        stage.process(asked(voice="Vivian"))


def test_a_small_model_takes_no_instructions(tiny_dir: Path, tmp_path: Path) -> None:
    for path in tiny_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**read_config(tiny_dir), "tts_model_size": "0b6"}))
    stage = InputProcessor(context(tmp_path, "input"))
    with pytest.raises(InvalidRequest, match="takes none"):
        stage.process(asked(options={"instructions": "slowly"}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tts_model_type": "base"}, "tts_model_type is 'base': it speaks with the voice of a recording"),
        ({"tokenizer_type": "qwen3_tts_tokenizer_25hz"}, "tokenizer_type is 'qwen3_tts_tokenizer_25hz'"),
        ({"tts_pad_token_id": "x"}, "tts_pad_token_id"),
        ({"tts_pad_token_id": 704}, "the id of tts_pad_token_id is 704; ids are 0 to 703"),
    ],
)
def test_models_that_are_refused_by_name(tiny_dir: Path, changed: dict[str, Any], message: str) -> None:
    config = read_config(tiny_dir)
    assert family_of(config, tiny_dir).name == "qwen3_tts"
    with pytest.raises(ConfigError, match=message):
        graph({**config, **changed})


def test_a_dialect_without_an_id_is_named(tiny_dir: Path) -> None:
    config = read_config(tiny_dir)
    config["talker_config"]["spk_is_dialect"]["ryan"] = "x_dialect"
    with pytest.raises(ConfigError, match="spk_is_dialect of ryan is 'x_dialect', which is not in codec_language_id"):
        graph(config)


def test_a_talker_and_a_speech_tokenizer_of_different_groups(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / files.SPEECH_TOKENIZER / "config.json"
    codec = json.loads(path.read_text())
    codec["decoder_config"]["num_quantizers"] = 8
    path.write_text(json.dumps(codec))
    with pytest.raises(ConfigError, match="the talker makes 4 codes per row, the speech tokenizer takes 8"):
        Talker(context(tmp_path, "talker"))
