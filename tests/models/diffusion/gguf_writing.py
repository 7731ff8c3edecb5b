"""A GGUF file of a tiny denoiser, written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from safetensors.torch import load_file

K_BLOCK = 256
"""Numbers of a block of the K types."""

WAN_NAMES: Mapping[str, str] = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    ".attn1.": ".self_attn.",
    ".attn2.": ".cross_attn.",
    ".to_out.0.": ".o.",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    ".ffn.net.0.proj.": ".ffn.0.",
    ".ffn.net.2.": ".ffn.2.",
    ".norm2.": ".norm3.",
    "proj_out": "head.head",
}
"""What the authors of Wan call what diffusers calls otherwise; modulations besides."""


def published_wan(name: str) -> str:
    """A tensor's name in Wan's own files."""
    for ours, theirs in WAN_NAMES.items():
        name = name.replace(ours, theirs)
    if name == "scale_shift_table":
        return "head.modulation"
    return name.replace("scale_shift_table", "modulation")


def write_gguf(
    checkpoint: Path, file: Path, kind: Type, rename: Callable[[str], str] = str, wide: Type = Type.F32
) -> dict[str, Type]:
    """The weights of a transformer in fewer bits, wherever their rows are whole blocks: rows of whole blocks of 256 as
    Q4_K, the others as `kind`; all other tensors as `wide`. Gives what each tensor was written as."""
    [source] = (checkpoint / "transformer").glob("*.safetensors")
    writer = gguf.GGUFWriter(str(file), "test")
    written: dict[str, Type] = {}
    for name, tensor in load_file(source).items():
        inputs = tensor.shape[-1]
        if tensor.ndim != 2 or not name.endswith(".weight") or inputs % 32:
            written[name] = wide
            if wide == Type.F32:
                writer.add_tensor(rename(name), tensor.numpy())
            else:
                writer.add_tensor(rename(name), quantize(tensor.numpy(), wide), raw_dtype=wide)
            continue
        written[name] = Type.Q4_K if inputs % K_BLOCK == 0 else kind
        packed = q4_k(tensor) if written[name] == Type.Q4_K else quantize(tensor.numpy(), kind)
        writer.add_tensor(rename(name), packed, raw_dtype=written[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def q4_k(weight: torch.Tensor) -> np.ndarray:
    """[rows, columns] → bytes [rows, columns / 256 * 144]: per 256 numbers a scale and an offset in 16 bits, per 32 of
    them 6 bits of each (here all of a block have the same), and 4 bits per number (llama.cpp, `block_q4_K`)."""
    blocks = weight.reshape(-1, K_BLOCK).double()
    offset = (-blocks.amin(1)).clamp_min(0)
    scale = (blocks.amax(1) + offset) / 15
    steps = ((blocks + offset[:, None]) / scale[:, None]).round().clamp(0, 15).to(torch.uint8)
    # scale times 1 and offset times 1: of the 12 bytes the first eight hold four scales and four offsets, and the last
    # four the low halves of the other four of both
    six_bits = np.tile(np.array([1] * 8 + [0x11] * 4, np.uint8), (len(blocks), 1))
    pairs = steps.reshape(-1, 4, 2, 32)  # of 64 numbers, the first 32 are low halves of the bytes
    packed = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128).numpy()
    halves = torch.stack([scale, offset], 1).half().numpy().view(np.uint8)
    return np.concatenate([halves, six_bits, packed], 1).reshape(weight.shape[0], -1)
