"""The tiny checkpoint that the tests of this family share."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.models.speech.higgs_audio_v2.tiny import presets as tiny


@pytest.fixture(scope="package")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("higgs-audio-v2")
    tiny.make(directory)
    return directory
