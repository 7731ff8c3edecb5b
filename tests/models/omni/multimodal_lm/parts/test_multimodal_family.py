"""Which checkpoints the family of models that see or hear takes, and what it says to the others; all without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from segue.messages.errors import ConfigError
from segue.models.omni.multimodal_lm.family import FAMILY, TINY
from segue.models.registry import family_of

SEES = {"architectures": ["SeesForConditionalGeneration"], "model_type": "sees", "vision_config": {}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("more", "takes"),
    [
        ({}, {"text", "image"}),
        ({"video_token_id": 3}, {"text", "image", "video"}),
        ({"video_token_index": 3, "audio_config": {}}, {"text", "image", "video", "audio"}),
        ({"architectures": ["SeesForCausalLM"]}, {"text", "image"}),
        ({"text_config": {"layer_types": ["linear_attention", "full_attention"]}}, {"text", "image"}),
        ({"text_config": {"model_type": "lfm2"}}, {"text", "image"}),
    ],
)
def test_what_nobody_names_is_taken(checkpoint: Path, more: dict[str, Any], takes: set[str]) -> None:
    config = {**SEES, **more}
    family = family_of(config, checkpoint)
    assert family.name == "multimodal_lm"
    graph = family.graph(config)
    graph.validate()
    assert (graph.main, graph.takes, graph.gives) == ("llm", takes, {"text"})


def test_one_that_only_hears(checkpoint: Path) -> None:
    config = {"architectures": ["HearsForConditionalGeneration"], "audio_config": {}}
    assert family_of(config, checkpoint).graph(config).takes == {"text", "audio"}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"model_type": "idefics"}, "cross-attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"text_config": {"layer_types": ["indexed_attention", "full_attention"]}}, "layers of type indexed_attention"),
    ],
)
def test_what_is_known_not_to_work_is_refused_with_the_reason(
    checkpoint: Path, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        family_of({**SEES, **more}, checkpoint)
    assert str(caught.value).startswith("SeesForConditionalGeneration cannot be served")
    assert caught.value.field == "architectures"


def test_without_a_processor_there_is_no_way_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no processor") as caught:
        family_of(SEES, tmp_path)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    "config",
    [{}, {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["ClipModel"], "vision_config": {}}],
)
def test_others_are_left_to_others(checkpoint: Path, config: dict[str, Any]) -> None:
    assert not FAMILY.claims(config, checkpoint)


def test_the_names_are_those_of_the_presets() -> None:
    from segue.models.omni.multimodal_lm.tiny.presets import PRESETS

    assert set(TINY) == set(PRESETS)


def test_no_torch_is_imported(checkpoint: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from segue.models.registry import family_of\n"
        f"c = {SEES!r}; p = Path({str(checkpoint)!r})\n"
        "f = family_of(c, p); f.graph(c).validate(); f.chats(p)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
