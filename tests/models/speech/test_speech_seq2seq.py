"""Whisper writes down what it hears as the library's `generate` does: alone, beside others, preempted, in any language,
with marks of time, window after window."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from speech_family import END, Library, Samples, Stages, long_recording, recordings
from transformers import WhisperForConditionalGeneration

from segue import Omni, SamplingParams
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.registry import family_of, read_config
from segue.models.shared.decoder.decoder import PagedDecoder
from segue.models.shared.decoder.interface import decoder_of, name_of
from segue.models.speech.speech_seq2seq import tiny
from segue.models.speech.speech_seq2seq.loading import separate_cross_attention
from selection import daily

CONFIG: dict[str, Any] = {"defaults": {"dtype": "float32"}, "stages": {"llm": {"block_size": 4}}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whisper")
    tiny.make(directory)
    return directory


@pytest.fixture(scope="module")
def library(directory: Path) -> Library:
    return Library(directory)


@pytest.fixture(scope="module")
def clips(assets: Path) -> dict[str, Samples]:
    return recordings(assets / "speech.wav")


@pytest.fixture(scope="module")
def omni(directory: Path) -> Iterator[Omni]:
    with Omni(directory, config=CONFIG, progress=False) as omni:
        yield omni


@pytest.fixture(scope="module")
def expected(library: Library, clips: dict[str, Samples]) -> dict[str, list[int]]:
    """Without a language, which is then heard."""
    return {name: library.ids(clip) for name, clip in clips.items()}


@pytest.fixture(scope="module")
def stages(directory: Path) -> Stages:
    return Stages(directory)


def written(out: Any) -> list[int]:
    """Without the end token, which `generate` leaves out, too."""
    ids: list[int] = out.token_ids["llm"]
    return ids[:-1] if ids[-1:] == [END] else ids


@pytest.mark.nightly
def test_ten_recordings_beside_each_other(
    omni: Omni, clips: dict[str, Samples], expected: dict[str, list[int]], library: Library
) -> None:
    outs = dict(zip(clips, omni.generate([{"audio": clip} for clip in clips.values()]), strict=True))
    assert {name: written(out) for name, out in outs.items()} == expected
    assert {name: out.text for name, out in outs.items()} == {name: library.text(ids) for name, ids in expected.items()}
    assert len({tuple(ids) for ids in expected.values()}) > 6  # what is heard counts
    assert {len(ids) < 92 for ids in expected.values()} == {True, False}  # some end by themselves
    assert len({out.language for out in outs.values()}) > 1


def test_alone_and_once_more(omni: Omni, clips: dict[str, Samples], expected: dict[str, list[int]]) -> None:
    for name in ("voice", "backwards"):
        first, again = (omni.generate({"audio": clips[name]})[0] for _ in range(2))
        assert written(first) == written(again) == expected[name]


@pytest.mark.parametrize("asked", [{"language": "de", "task": "translate"}, {"prompt": "Of ships", "language": "en"}])
def test_languages_tasks_and_texts_before(
    omni: Omni, clips: dict[str, Samples], library: Library, asked: dict[str, str], expected: dict[str, list[int]]
) -> None:
    names = ["voice", "its beginning", "backwards"]
    outs = omni.generate([{"audio": clips[name]} for name in names], options=asked)
    wanted = [library.ids(clips[name], **asked) for name in names]
    assert [written(out) for out in outs] == wanted
    assert wanted != [expected[name] for name in names]
    assert {out.language for out in outs} == {asked["language"]}


def test_marks_of_time(omni: Omni, clips: dict[str, Samples], library: Library) -> None:
    names = ["voice", "backwards", "a tone", "noise"]
    outs = omni.generate([{"audio": clips[name]} for name in names], options={"language": "fr", "timestamps": True})
    for name, out in zip(names, outs, strict=True):
        wanted = library.segments(clips[name], language="fr")
        assert [(one.start, one.end, one.token_ids) for one in out.segments] == wanted
        assert out.token_ids["llm"] == [token for _, _, ids in wanted for token in ids]
        assert out.text == "".join(one.text for one in out.segments) == library.text(out.token_ids["llm"])


@pytest.mark.parametrize("asked", [{}, {"timestamps": True, "language": "es", "prompt": "Of hills and the sea"}])
def test_more_than_a_window(omni: Omni, clips: dict[str, Samples], library: Library, asked: dict[str, Any]) -> None:
    clip = long_recording(clips)
    [out] = omni.generate({"audio": clip}, options=asked)
    wanted = library.segments(clip, **{name: value for name, value in asked.items() if name != "timestamps"})
    assert [(one.start, one.end, one.token_ids) for one in out.segments] == wanted
    assert len({one.seek for one in out.segments}) > 1  # several windows


SETTINGS: dict[str, dict[str, Any]] = {
    "preempted": {"num_blocks": 80},
    "token by token": {"prefill_chunk": 1},
    "one at a time": {"max_batch": 1},
}


@pytest.fixture(scope="module")
def french(library: Library, clips: dict[str, Samples]) -> dict[str, list[int]]:
    return {name: library.ids(clip, language="fr") for name, clip in list(clips.items())[:4]}


@pytest.mark.parametrize(
    "setting", daily(("preempted", "token by token", "one at a time"), ("preempted", "token by token"))
)
def test_however_the_engine_runs(
    stages: Stages, clips: dict[str, Samples], french: dict[str, list[int]], setting: str
) -> None:
    engine = stages.engine(**SETTINGS[setting])
    for _ in range(2):  # once more, from the prefix cache
        assert stages.written(engine, {name: clips[name] for name in french}, language="fr") == french
    assert (engine.stats()["preemptions_total"] > 0) is (setting == "preempted")


def test_room_for_one_window(directory: Path, clips: dict[str, Samples], french: dict[str, list[int]]) -> None:
    """Keys and values of the others are made anew in each step."""
    stages = Stages(directory, cache_bytes=2_400_000)
    assert stages.written(stages.engine(), {name: clips[name] for name in french}, language="fr") == french
    assert stages.llm.kept.made > len(french)
    assert stages.llm.kept.bytes <= 2_400_000


def test_a_window_is_made_once(stages: Stages, clips: dict[str, Samples]) -> None:
    before = stages.llm.kept.made
    stages.written(stages.engine(), {"once": clips["noise"] * 2, "again": clips["noise"] * 2}, language="en")
    assert stages.llm.kept.made == before + 1


@pytest.mark.parametrize("part", ["decoder.layers.1.encoder_attn.v_proj", "encoder.layers.0.fc1"])
def test_weights_count(
    directory: Path, tmp_path: Path, clips: dict[str, Samples], french: dict[str, list[int]], part: str
) -> None:
    """The comparison shows it where one weight is another."""
    spoilt = tmp_path / "spoilt"
    shutil.copytree(directory, spoilt)
    tensors = load_file(spoilt / "model.safetensors")
    tensors[f"model.{part}.weight"] = -tensors[f"model.{part}.weight"]
    save_file(tensors, spoilt / "model.safetensors", metadata={"format": "pt"})
    stages = Stages(spoilt)
    assert stages.written(stages.engine(), {"voice": clips["voice"]}, language="fr")["voice"] != french["voice"]


class Louder(WhisperForConditionalGeneration):
    """Does something to the encoder's rows that its decoder knows nothing of."""

    def forward(self, *given: Any, encoder_outputs: tuple[torch.Tensor, ...], **named: Any) -> Any:
        louder = (encoder_outputs[0] * 1.1,)
        return super().forward(*given, encoder_outputs=louder, **named)


@pytest.mark.parametrize("kind", [WhisperForConditionalGeneration, Louder])
def test_a_model_that_does_more_than_its_decoder_is_refused(
    directory: Path, kind: type[WhisperForConditionalGeneration]
) -> None:
    """What the engine's halves give is compared with the library's forward at load."""
    model = kind.from_pretrained(directory).eval().requires_grad_(False)
    encoder_states = torch.randn(1, 40, model.config.d_model)
    separate_cross_attention(model, encoder_states)
    refused = pytest.raises(ConfigError, match="cannot be served: its logits") if kind is Louder else nullcontext()
    with refused:
        PagedDecoder(model, inner=name_of(decoder_of(model), model), fused=True, encoder_states=encoder_states)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"language": "xx"}, "language is 'xx', which this model does not know"),
        ({"task": "transcibe"}, "task is 'transcibe'.*did you mean 'transcribe'"),
        ({"timestamps": "yes"}, "timestamps is 'yes'"),
        ({"prompt": "<|startoftranscript|>"}, "prompt cannot be tokenized"),
        ({"lang": "en"}, "no option 'lang'"),
    ],
)
def test_options_that_are_wrong(omni: Omni, clips: dict[str, Samples], options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        omni.generate({"audio": clips["voice"]}, options=options)


def test_requests_that_are_wrong(omni: Omni, clips: dict[str, Samples]) -> None:
    audio = {"type": "audio", "audio": clips["voice"]}
    text = {"type": "text", "text": "what is said?"}
    with pytest.raises(InvalidRequest, match="one recording"):
        omni.generate({"messages": [{"role": "user", "content": [audio, text]}]})
    with pytest.raises(InvalidRequest, match=r"one recording"):
        omni.generate({"prompt": "Good morning"})
    with pytest.raises(InvalidRequest, match="too short"):
        omni.generate({"audio": clips["voice"][:100]})
    with pytest.raises(InvalidRequest, match="one unconstrained output"):
        omni.generate({"audio": clips["voice"]}, sampling=SamplingParams(n=2))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("generation_config.json", {"no_speech_threshold": 0.6}, "no_speech_threshold is 0.6"),
        ("generation_config.json", {"no_timestamps_token_id": None}, "no_timestamps_token_id is None"),
        ("generation_config.json", {"lang_to_id": []}, "lang_to_id is"),
        ("config.json", {"model_type": "speech_to_text"}, "one position for all sequences"),
    ],
)
def test_checkpoints_that_are_refused(
    directory: Path, tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    for file in directory.glob("*.json"):
        shutil.copy(file, tmp_path)
    values = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps({**values, **change}))
    with pytest.raises(ConfigError, match=said):
        family_of(read_config(tmp_path), tmp_path)


def test_tensors_are_those_of_the_seed(directory: Path, tmp_path: Path) -> None:
    tiny.make(tmp_path)
    ours, again = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
