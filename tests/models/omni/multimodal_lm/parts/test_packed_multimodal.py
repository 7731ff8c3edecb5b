"""Models that see, with the language half packed: the library's answers on wide weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from multimodal_family import Run, Stages, answer, cases_of, processed
from packed_files import Packed, awq, compressed, write

from segue.models.omni.multimodal_lm.tiny import presets as tiny

AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
    "modules_to_not_convert": ["visual"],
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["re:.*lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
}


@pytest.mark.parametrize(
    ("family", "written"), [("qwen2.5-vl", AWQ), ("llava-onevision", COMPRESSED), ("qwen3-vl", COMPRESSED)]
)
def test_the_language_half_is_packed(tmp_path: Path, family: str, written: dict[str, object]) -> None:
    tiny.make(family, tmp_path / "made")

    def pack(layer: str, weight: torch.Tensor) -> Packed | None:
        if ".layers." not in layer or "vis" in layer or weight.shape[0] % 8 or weight.shape[1] % 32:
            return None
        return awq(weight) if written is AWQ else compressed(weight)

    packed, plain = write(tmp_path / "made", tmp_path, pack, written)
    stages = Stages(packed)
    assert stages.llm.weight_bytes < 0.8 * Stages(plain).llm.weight_bytes
    cases = cases_of(family)
    assert Run(stages)(cases) == {case.name: answer(plain, processed(plain, case)) for case in cases}
