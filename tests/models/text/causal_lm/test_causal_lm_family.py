"""Which checkpoints the fall-back family takes, and what it says to the others; all without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from segue.messages.errors import ConfigError
from segue.models.registry import family_of
from segue.models.text.causal_lm.family import FAMILY, TINY

HERE = Path()


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["NeverHeardOfForCausalLM"], "model_type": "never_heard_of"},
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ],
    ids=lambda config: config["model_type"],
)
def test_a_causal_lm_that_nobody_names_is_taken(config: dict[str, Any]) -> None:
    family = family_of(config, HERE)
    assert family.name == "causal_lm"
    graph = family.graph(config)
    graph.validate()
    assert (graph.main, graph.takes, graph.gives) == ("llm", {"text"}, {"text"})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, "not in the library's cache"),
        ({"architectures": ["ZambaForCausalLM"], "model_type": "zamba"}, "share an attention module"),
        (
            {
                "architectures": ["Qwen4ExpForCausalLM"],
                "model_type": "qwen4_exp_text",
                "layer_types": ["linear_attention", "indexed_attention"],
            },
            "layers of type indexed_attention",
        ),
        ({"architectures": ["HrmTextForCausalLM"], "model_type": "hrm_text", "prefix_lm": True}, "prefix_lm"),
        ({"architectures": ["BartForCausalLM"], "is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_what_is_known_not_to_work_is_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        family_of(config, HERE)
    assert str(caught.value).startswith(config["architectures"][0])
    assert caught.value.field == "architectures"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": ["T5ForConditionalGeneration"]},
        {"architectures": ["BertForMaskedLM"]},
    ],
)
def test_what_is_no_language_model_is_left_to_others(config: dict[str, Any]) -> None:
    assert not FAMILY.claims(config, HERE)
    with pytest.raises(ConfigError, match=r"no family serves|names no architectures"):
        family_of(config, HERE)


def test_a_model_that_sees_is_left_to_the_multimodal_family() -> None:
    assert not FAMILY.claims({"architectures": ["SeesForCausalLM"], "vision_config": {}}, HERE)


def test_a_named_family_comes_first() -> None:
    assert family_of({"architectures": ["Qwen2_5OmniModel", "LlamaForCausalLM"]}, HERE).name == "qwen2_5_omni"


def test_a_checkpoint_chats_where_it_has_a_template(tmp_path: Path) -> None:
    assert not FAMILY.chats(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text("{}")
    assert not FAMILY.chats(tmp_path)
    path.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert FAMILY.chats(tmp_path)
    path.unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert FAMILY.chats(tmp_path)
    path.write_text("[")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="not JSON"):
        FAMILY.chats(tmp_path)


def test_the_names_are_those_of_the_presets() -> None:
    from segue.models.text.causal_lm.tiny import PRESETS

    assert set(TINY) == set(PRESETS)


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from pathlib import Path; from segue.models.registry import family_of\n"
        "f = family_of({'architectures': ['LlamaForCausalLM']}, Path()); f.graph({}).validate(); f.chats(Path())\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
