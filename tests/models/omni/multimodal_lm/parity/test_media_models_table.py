"""The other table of model types in docs/models.md: every model of transformers that makes text of media."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from multimodal_family import FAMILIES, context
from test_multimodal_others import REFUSED, SERVED
from test_multimodal_wide import WIDE

from segue.messages.errors import ConfigError
from segue.models.omni.multimodal_lm.loading import media_tokens
from segue.models.omni.multimodal_lm.tiny.config import SMALL
from segue.models.registry import family_of
from segue.models.shared.library import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

DOC = Path(__file__).parents[5] / "docs" / "models.md"
CLASSES: dict[str, str] = dict(AutoModelForMultimodalLM._model_mapping._model_mapping)
BY_CONFIG = {
    "encoder-decoders": "encoder-decoder",
    "cross-attention": "cross-attention",
    "a state per sequence": "a state per sequence",
    "other kinds of attention": "the engine supports full, sliding and chunked attention",
    "do more than replace tokens": (
        "autoencoder|an index of their own|a LoRA adapter|along with every generated token|noise"
    ),
    "other outputs than text": "by denoising|actions",
}
"""Words of a row → what is said to one who starts such a model."""


def rows() -> dict[str, list[str]]:
    """What is said → the model types that it is said of."""
    _, _, section = DOC.read_text().partition("### Their model types")
    section, _, _ = section.partition("\n## ")
    lines = re.findall(r"^\| (?P<what>[^|]+) \| (?P<types>`[^|]+`) \|$", section, re.MULTILINE)
    return {what: re.findall(r"`([\w.-]+)`", types) for what, types in lines}


def row(words: str) -> list[str]:
    found = rows()
    [types] = [types for what, types in found.items() if words in what] if words not in found else [found[words]]
    return types


def default(kind: str) -> dict[str, Any]:
    """A `config.json` of a type, with the class that its checkpoints name, and with the encoders it may leave out."""
    config: dict[str, Any] = AutoConfig.for_model(kind, architectures=[CLASSES[kind]]).to_dict()
    return {key: {} if key == "vision_config" and value is None else value for key, value in config.items()}


def family_name(kind: str, directory: Path) -> str:
    return family_of(default(kind), directory).name


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "preprocessor_config.json").write_text("{}")
    return tmp_path


def test_every_type_has_its_place() -> None:
    counted = Counter(name for types in rows().values() for name in types)
    assert {name for name, count in counted.items() if count > 1} == set()
    assert counted.keys() == CLASSES.keys()


def test_those_served_are_those_compared() -> None:
    wide = {kind for kind, _ in WIDE.values()}
    assert set(row("served")) == {SMALL[name].model_type for name in FAMILIES} | SERVED.keys() | wide | {"paligemma"}
    assert set(row("processors with another interface for media")) == REFUSED.keys()


def test_what_the_config_says_is_refused_by_it(directory: Path) -> None:
    for words, reason in BY_CONFIG.items():
        for kind in row(words):
            if kind == "mistral4":  # a class of causal LMs that the library does not know as one
                assert kind not in AutoModelForCausalLM._model_mapping._model_mapping
                continue
            with pytest.raises(ConfigError, match=f"^{CLASSES[kind]} cannot be served: .*({reason})"):
                family_name(kind, directory)


def test_the_others_are_taken(directory: Path) -> None:
    refused = {kind for words in BY_CONFIG for kind in row(words)}
    own = row("served by its own family")
    for kind in CLASSES.keys() - refused:
        assert (family_name(kind, directory) == "multimodal_lm") == (kind not in own), kind


def test_those_whose_config_names_no_token(directory: Path) -> None:
    for kind in row("unless the config names a token"):
        AutoConfig.for_model(kind).save_pretrained(directory)
        with pytest.raises(ConfigError, match="its config names no token for"):
            media_tokens(context(directory, "input"))
