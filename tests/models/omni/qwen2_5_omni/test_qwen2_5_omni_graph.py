"""The family as the registry knows it, its graph, and the voices read from a speaker file."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.messages.errors import ConfigError
from segue.messages.request import MediaPart, Message, Request, TextPart
from segue.models.omni.qwen2_5_omni.family import voices
from segue.models.omni.qwen2_5_omni.graph import graph
from segue.models.registry import family_of, read_config


def request(*, image: bool = False, modalities: tuple[str, ...] = ("text",)) -> Request:
    content: list[Any] = [TextPart("hello")]
    if image:
        content.append(MediaPart("image", b"..."))
    return Request(request_id="r", messages=[Message("user", content)], modalities=list(modalities))


def test_the_graph_is_valid_and_its_main_stage_is_the_thinker() -> None:
    g = graph({})
    g.validate()
    assert g.topological() == ("input", "encoder", "thinker", "talker", "vocoder")
    assert g.main == "thinker"
    assert g.takes == {"text", "image", "audio", "video"}
    assert g.gives == {"text", "audio"}
    assert {edge.source for edge in g.edges if edge.target == "thinker"} == {"input", "encoder"}


def test_a_text_request_wants_neither_encoder_nor_talker() -> None:
    assert set(graph({}).walk(request())) == {"input", "thinker"}


def test_speech_wants_the_talker_and_media_the_encoder() -> None:
    g = graph({})
    assert set(g.walk(request(modalities=("text", "audio")))) == {"input", "thinker", "talker", "vocoder"}
    assert "encoder" in g.walk(request(image=True))


def test_a_checkpoint_without_audio_output_has_no_talker() -> None:
    g = graph({"enable_audio_output": False})
    g.validate()
    assert g.topological() == ("input", "encoder", "thinker")
    assert g.gives == {"text"}


@pytest.mark.parametrize("name", ["Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"])
def test_the_registry_finds_the_family(name: str) -> None:
    assert family_of({"architectures": [name]}, Path()).name == "qwen2_5_omni"


def test_the_control_plane_half_imports_no_torch(tiny_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from segue.models.registry import family_of, read_config\n"
        f"d = Path({str(tiny_dir)!r}); f = family_of(read_config(d), d); f.graph(read_config(d)).validate()\n"
        "print(f.voices(d)); assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['Chelsie', 'Ethan']"


def save(path: Path, speakers: Any, **how: Any) -> Path:
    torch.save(speakers, path / "spk_dict.pt", **how)
    return path


ENTRY = {"cond": torch.zeros(1, 4), "ref_mel": torch.zeros(1, 3, 2), "bos_token": 7, "nested": {"inner": {"deep": 1}}}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_voices_are_the_outermost_names_only(tmp_path: Path, protocol: int) -> None:
    speakers = {name: dict(ENTRY) for name in ("Zoe", "bos_token", "Chelsie", "Ethan")}
    save(tmp_path, speakers, pickle_protocol=protocol)
    assert voices(tmp_path) == ["Chelsie", "Zoe", "bos_token", "Ethan"]


def test_one_voice_and_ordered_dicts_are_read(tmp_path: Path) -> None:
    assert voices(save(tmp_path, {"Solo": ENTRY})) == ["Solo"]
    assert voices(save(tmp_path, OrderedDict(b=ENTRY, a=ENTRY))) == ["b", "a"]


def test_no_speaker_file_no_voices(tmp_path: Path) -> None:
    assert voices(tmp_path) == []


def test_reading_voices_runs_nothing_of_the_pickle(tmp_path: Path) -> None:
    flag = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (flag,)

    with zipfile.ZipFile(tmp_path / "spk_dict.pt", "w") as archive:
        archive.writestr("spk_dict/data.pkl", pickle.dumps({"Chelsie": Evil()}, protocol=2))
    assert voices(tmp_path) == ["Chelsie"]
    assert not flag.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"not a zip",
        b"".join([b"PK\x05\x06", b"\0" * 18]),  # an empty zip
    ],
)
def test_a_broken_speaker_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "spk_dict.pt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"spk_dict\.pt"):
        voices(tmp_path)


@pytest.mark.parametrize("pickled", [pickle.dumps([]), pickle.dumps({}), b"", b"garbage", pickle.dumps({"a": 1})[:-1]])
def test_a_speaker_file_without_voices_is_refused(tmp_path: Path, pickled: bytes) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
    (tmp_path / "spk_dict.pt").write_bytes(buffer.getvalue())
    with pytest.raises(ConfigError, match=r"spk_dict\.pt"):
        voices(tmp_path)


def test_read_config_of_the_tiny_checkpoint(tiny_dir: Path) -> None:
    assert family_of(read_config(tiny_dir), tiny_dir).tiny_names == ("qwen2.5-omni",)
