"""The family as the registry knows it, and its graph."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from segue.messages.request import MediaPart, Message, Request, TextPart
from segue.models.omni.qwen2_5_omni.graph import graph
from segue.models.registry import family_of


def request(*, image: bool = False, modalities: tuple[str, ...] = ("text",)) -> Request:
    content: list[Any] = [TextPart("hello")]
    if image:
        content.append(MediaPart("image", b"..."))
    return Request(request_id="r", messages=[Message("user", content)], modalities=list(modalities))


def test_the_graph_is_valid_and_its_main_stage_is_the_thinker() -> None:
    g = graph({})
    g.validate()
    assert g.topological() == ("input", "encoder", "thinker", "talker", "vocoder", "output")
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
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
