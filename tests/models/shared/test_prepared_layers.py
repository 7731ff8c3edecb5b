"""Which layers networks of tiny presets get: from `segue.kernels.prepare`, on a CPU with compiled kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm_family import load, make
from torch import nn

from segue.engines.contract import LoadContext
from segue.engines.diffusion.contract import DenoiserContext, Row
from segue.kernels.cpu_kernels import cpu_kernels
from segue.kernels.graphs.replay import is_replayed
from segue.models.images.qwen_image import tiny as qwen_image
from segue.models.images.qwen_image.denoiser import QwenImageDenoiser
from segue.models.speech.speech_seq2seq import tiny as speech_seq2seq
from segue.models.speech.speech_seq2seq.encoder import Encoder

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="the kernels were not compiled, or not for this CPU")

F32, BF16 = torch.float32, torch.bfloat16
FUSED = {"FusedNorm": 5, "FusedLinear": 4, "FusedPart": 6, "GatedMLP": 2}

DECODERS: list[tuple[str, torch.dtype, str, dict[str, int]]] = [
    ("qwen2", F32, "none", {**FUSED, "PackedLinear": 9}),
    ("qwen2", BF16, "none", {"FusedLinear": 4, "FusedPart": 10, "Linear": 9}),
    ("qwen2", F32, "int8", {**FUSED, "RoundedLinear": 8, "PackedLinear": 1}),
    ("qwen2", BF16, "int8", {"FusedLinear": 4, "FusedPart": 10, "RoundedLinear": 8, "Linear": 1}),
    ("qwen2", F32, "int4", {**FUSED, "GroupedLinear": 8, "PackedLinear": 1}),
    ("qwen2", F32, "bfloat16", {**FUSED, "RoundedLinear": 8, "PackedLinear": 1}),
    ("qwen2", F32, "fp8", {**FUSED, "StoredLinear": 8, "PackedLinear": 1}),
    ("qwen3-moe", F32, "none", {"FusedNorm": 9, "FusedLinear": 2, "FusedPart": 6, "PackedLinear": 5, "_Packed": 4}),
    ("phi3", F32, "none", {"FusedNorm": 5, "PackedLinear": 9}),
    ("bloom", F32, "none", {"PackedLinear": 9}),
]
FOLDED = {"FoldedBlock": 3, "KeptRows": 6}
JOINED = {"FusedLinear": 6, "FusedPart": 18}
DENOISERS: list[tuple[dict[str, Any], dict[str, int], bool]] = [
    ({}, {**FOLDED, **JOINED, "PackedLinear": 36}, True),
    ({"recorded": False}, {**FOLDED, **JOINED, "PackedLinear": 36}, False),
    ({"quantization": "int8"}, {**FOLDED, "RoundedLinear": 42, "PackedLinear": 6}, True),
    ({"fused": False}, {"PackedLinear": 48}, True),
    ({"dtype": BF16}, {**JOINED, "Linear": 36}, False),
]


def layers(network: nn.Module) -> dict[str, int]:
    """The numbers of linear layers and of those of this program, by class."""
    ours = [type(each) for each in network.modules() if type(each).__module__.startswith("segue.")]
    linears = [nn.Linear for each in network.modules() if type(each) is nn.Linear]
    return dict(Counter(each.__name__ for each in [*ours, *linears] if each.__name__ != "_HandedThrough"))


@pytest.mark.parametrize(("kind", "dtype", "quantization", "expected"), DECODERS)
def test_decoders(kind: str, dtype: torch.dtype, quantization: str, expected: dict[str, int], tmp_path: Path) -> None:
    adapter = load(make(kind, tmp_path), dtype=dtype, quantization=quantization)
    assert layers(nn.ModuleList(networks(vars(adapter).values()))) == expected


def networks(values: Iterable[Any]) -> list[nn.Module]:
    """The modules among the values, and among the attributes of objects of this program."""
    found = []
    for value in values:
        if isinstance(value, nn.Module):
            found.append(value)
        elif type(value).__module__.startswith("segue.models") and hasattr(value, "__dict__"):
            found += networks(vars(value).values())
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen-image")
    qwen_image.make(directory)
    return directory


@pytest.mark.parametrize(("keys", "expected", "replayed"), DENOISERS)
def test_denoisers(checkpoint: Path, keys: dict[str, Any], expected: dict[str, int], replayed: bool) -> None:
    ctx = replace(DenoiserContext(checkpoint, "denoiser", torch.device("cpu"), F32), **keys)
    adapter = QwenImageDenoiser(ctx)
    with torch.inference_mode():
        adapter.predict([Row(next(adapter.trials()), 0)])
    assert layers(adapter.network) == expected
    assert is_replayed(adapter.network) == replayed


@pytest.mark.parametrize(("dtype", "kind"), [(F32, "PackedLinear"), (BF16, "Linear")])
def test_encoders(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    speech_seq2seq.make(tmp_path)
    encoder = Encoder(LoadContext(tmp_path, "encoder", torch.device("cpu"), dtype))
    assert layers(nn.ModuleList(networks(vars(encoder).values()))) == {kind: 12}
