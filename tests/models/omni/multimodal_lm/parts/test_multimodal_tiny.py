"""The small checkpoints that see or hear: in the published formats, and the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from segue.messages.errors import InvalidRequest
from segue.models.omni.multimodal_lm.tiny import presets as tiny
from segue.models.omni.multimodal_lm.tiny.config import SMALL
from segue.models.shared.library import AutoProcessor


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen2.5-vl", ["visual.blocks.1.attn.qkv.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]),
        ("qwen3-vl", ["model.visual.deepstack_merger_list.1.norm.weight", "model.language_model.norm.weight"]),
        ("llava-onevision", ["image_newline", "language_model.model.embed_tokens.weight"]),
        ("gemma3-vision", ["multi_modal_projector.mm_soft_emb_norm.weight", "language_model.model.norm.weight"]),
        (
            "llama3.2-vision",
            [
                "vision_model.global_transformer.layers.0.gate_attn",
                "language_model.model.layers.1.cross_attn.k_norm.weight",
                "multi_modal_projector.bias",
            ],
        ),
        ("qwen2-audio", ["audio_tower.conv1.weight", "language_model.lm_head.weight"]),
    ],
)
def test_names_of_tensors_and_tokens_are_the_published_ones(kind: str, names: list[str], tmp_path: Path) -> None:
    tiny.make(kind, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(names) <= set(file.keys())
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = AutoProcessor.from_pretrained(tmp_path).tokenizer
    for key, token in SMALL[kind].ids.items():
        assert config[key] == tokenizer.convert_tokens_to_ids(token)


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        tiny.make("qwen3-vl", tmp_path / name, seed=seed)
    one, two, three = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two", "three")
    )
    assert one == two
    assert {name for name in one if one[name] != three[name]} == {"model.safetensors"}


def test_there_is_one_size(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no size 'huge'"):
        tiny.make("qwen3-vl", tmp_path, size="huge")
