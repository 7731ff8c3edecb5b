"""A checkpoint directory without tokenizer, processor and template: served by token ids."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from truth_system import BY_NAME, WITHIN, System, Truth, apart

from segue.messages.errors import InvalidRequest

pytestmark = pytest.mark.nightly  # test_truth_skip_tokenizer

CASE = BY_NAME["text"]
KEPT = (".safetensors", "config.json", "model.safetensors.index.json", ".pt")


@pytest.fixture(scope="module")
def bare(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("bare")
    for path in tiny_dir.iterdir():
        if path.name in KEPT or path.suffix in KEPT:
            shutil.copy(path, directory / path.name)
    system = System(directory)
    yield system
    system.close()


def prompt(truth: Truth, assets: Path) -> dict[str, Any]:
    whole = CASE.prompt(assets, prompt_token_ids=truth.inputs(CASE)["input_ids"][0].tolist())
    del whole["messages"]
    return whole


def test_ids_in_ids_and_audio_out(bare: System, truth: Truth, assets: Path) -> None:
    reply = truth.of(CASE)
    for output in bare.ask(prompt(truth, assets), prompt(truth, assets)):
        assert output.token_ids["thinker"] == reply.token_ids
        assert output.token_ids["talker"][: len(reply.codes)] == reply.codes
        assert output.text == ""
        assert output.audio is not None
        assert apart(output.audio.samples, reply.samples.numpy().reshape(-1)) < WITHIN[1]


def test_messages_are_refused_with_what_to_do(bare: System, truth: Truth, assets: Path) -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer; send prompt_token_ids") as caught:
        bare.ask(CASE.prompt(assets))
    assert caught.value.field == "messages"
    [output] = bare.ask(prompt(truth, assets))
    assert output.token_ids["thinker"] == truth.of(CASE).token_ids
