"""The tiny checkpoints that the tests of this family share."""

from __future__ import annotations

from pathlib import Path

import pytest
from qwen3_tts_family import check_same_weights

from segue.models.speech.qwen3_tts.tiny import presets as tiny


@pytest.fixture(scope="package")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3-tts")
    tiny.make(directory)
    check_same_weights(directory, "custom_voice")
    return directory


@pytest.fixture(scope="package")
def design_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Voice design: no voices, described ones."""
    directory = tmp_path_factory.mktemp("qwen3-tts-voice-design")
    tiny.PRESETS["qwen3-tts-voice-design"].make(directory, "tiny", 0)
    check_same_weights(directory, "voice_design")
    return directory
