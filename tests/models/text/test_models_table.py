"""The table of model types in docs/models.md: every causal LM that transformers knows, with what becomes of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError

from segue.models.shared.library import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from segue.models.unserved import unserved

DOC = Path(__file__).parents[3] / "docs" / "models.md"
BY_CONFIG = ("encoder-decoders", "a state per sequence", "other kinds of attention")
"""Rows of what the config says."""
WITHOUT_DEFAULTS = {"gemma4_assistant"}
NO_INTERFACE = "no `AttentionInterface`"


def rows() -> dict[str, list[str]]:
    """What is said → the model types that it is said of."""
    _, _, section = DOC.read_text().partition("### Model types of transformers")
    section, _, _ = section.partition("\n## ")
    lines = re.findall(r"^\| (?P<what>[^|]+) \| (?P<types>`[^|]+`) \|$", section, re.MULTILINE)
    return {what: re.findall(r"`([\w-]+)`", types) for what, types in lines}


def row(words: str) -> list[str]:
    [types] = [types for what, types in rows().items() if words in what]
    return types


def known() -> dict[str, str]:
    """Model types of causal LMs, with the names of their classes."""
    names = AutoModelForCausalLM._model_mapping._model_mapping
    return dict(names)


def test_every_type_has_its_place() -> None:
    counted = Counter(name for types in rows().values() for name in types)
    assert {name for name, count in counted.items() if count > 1} == set()
    assert counted.keys() == known().keys()


def test_what_the_config_says_is_refused_by_it() -> None:
    refused = {name for words in BY_CONFIG for name in row(words)}
    found = set()
    for name in known():
        try:
            config = AutoConfig.for_model(name).to_dict()
        except StrictDataclassClassValidationError:
            continue  # its defaults are those of no model
        if unserved(config) is not None:
            found.add(name)
    assert found == refused | set(row("drafters")) - WITHOUT_DEFAULTS


def test_drafters_are_refused() -> None:
    for name in row("drafters"):
        reason = unserved({"model_type": name})
        assert reason is not None
        assert "drafts for another model" in reason


def test_those_with_media_are_in_the_other_table() -> None:
    assert set(row("with media")) <= AutoModelForMultimodalLM._model_mapping._model_mapping.keys()


@pytest.mark.parametrize("kind", ["openai-gpt", "xlnet", "roformer"])
def test_types_without_the_interface(kind: str) -> None:
    assert kind in row(NO_INTERFACE)
    model = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(kind))]
    assert not model._supports_attention_backend
