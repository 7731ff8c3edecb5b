"""How large the weights of each stage are, from the headers of a checkpoint's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from segue.graph.stage_graph import StageGraph
from segue.models.omni.qwen2_5_omni.graph import graph
from segue.models.shared.checkpoint.checkpoint import Checkpoint
from segue.models.shared.checkpoint.stored import stored_bytes


def test_every_tensor_of_an_omni_model_belongs_to_a_stage(tiny_dir: Path) -> None:
    found = stored_bytes(tiny_dir, graph({}))
    assert set(found) == {"encoder", "thinker", "talker", "vocoder"}
    shapes = Checkpoint(tiny_dir).shapes()
    assert sum(found.values()) == sum(tensor.nbytes for tensor in shapes.values())
    towers = [tensor.nbytes for name, tensor in shapes.items() if ".visual." in name or ".audio_tower." in name]
    assert found["encoder"] == sum(towers)


def two_stages() -> StageGraph:
    made = StageGraph("two")
    made.stage("whole", "autoregressive", takes={"text"}, gives={"text"}, tensors={""})
    made.stage("part", "module", takes={"image"}, tensors={"part."})
    made.edge("part", "whole")
    return made


def test_shards_and_the_longest_prefix(tmp_path: Path) -> None:
    save_file({"part.a": torch.zeros(3, dtype=torch.float16)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(5), "partly": torch.zeros(1)}, tmp_path / "2.safetensors", metadata={"format": "pt"})
    index = {"part.a": "1.safetensors", "b": "2.safetensors", "partly": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert stored_bytes(tmp_path, two_stages()) == {"part": 6, "whole": 24}


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\x02" + bytes(7) + b"[]", b"\x07" + bytes(7) + b'{"a":1}'])
def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert stored_bytes(tmp_path, two_stages()) == {}
    assert stored_bytes(tmp_path / "missing", two_stages()) == {}
