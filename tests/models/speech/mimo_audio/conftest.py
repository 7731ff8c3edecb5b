"""The tiny checkpoint that the tests of this family share."""

from __future__ import annotations

from pathlib import Path

import pytest
from mimo_audio_family import check_same_weights

from segue.models.speech.mimo_audio.tiny import presets as tiny


@pytest.fixture(scope="package")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mimo-audio")
    tiny.make(directory)
    check_same_weights(directory)
    return directory
