"""Registers Qwen2.5-Omni with the model registry. No torch here."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

from segue.messages.errors import ConfigError
from segue.models.family import Family
from segue.models.omni.qwen2_5_omni.graph import graph

SPEAKERS = "spk_dict.pt"
DEFAULT_VOICE = "Chelsie"
"""The speaker that `generate` of transformers uses when the caller names none."""

_KEYS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_GET = {"BINGET", "LONG_BINGET", "GET"}
_PUT = {"BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"}


def voices(model_dir: Path) -> list[str]:
    """The voices of a checkpoint, the default first; empty if it has no `spk_dict.pt`.

    The file is a zip made by `torch.save`. Names are read from the pickle's opcodes; nothing is unpickled.
    """
    path = model_dir / SPEAKERS
    if not path.is_file():
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            inside = next((name for name in archive.namelist() if name.split("/")[-1] == "data.pkl"), None)
            if inside is None:
                raise ConfigError(f"{path}: no data.pkl inside, so torch.save did not make it")
            names = _top_level_keys(archive.read(inside))
    except (zipfile.BadZipFile, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not names:
        raise ConfigError(f"{path}: names no voice")
    return sorted(names, key=lambda name: name != DEFAULT_VOICE)


def _top_level_keys(pickled: bytes) -> list[str]:
    """Keys of the outermost dict of a pickle, in order, found by following its stack without building any object.

    Text objects are represented by their text, all others by None: only the stack's depth and the position of the
    outermost dict matter. Raises `ValueError` if the bytes are not the pickle of a dict.
    """
    stack: list[str | None] = []
    marks: list[int] = []
    memo: dict[int, str | None] = {}
    keys: list[str] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in _KEYS:
            stack.append(str(argument))
        elif name in _GET:
            stack.append(memo.get(int(argument)))  # type: ignore[arg-type]
        elif name in _PUT:
            memo[len(memo) if name == "MEMOIZE" else int(argument)] = stack[-1]  # type: ignore[arg-type]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "STOP":
            return keys
        else:
            before = list(stack)
            base = _apply(opcode, stack, marks)
            if name in {"SETITEM", "SETITEMS"} and base == 1:
                keys.extend(key for key in before[base::2] if key is not None)
    raise ValueError("the pickle has no end")


def _apply(opcode: pickletools.OpcodeInfo, stack: list[str | None], marks: list[int]) -> int:
    """Apply an opcode's effect to the stack, all objects unknown; returns the stack height below its results."""
    taken = [item.name for item in opcode.stack_before]
    if "mark" in taken:
        if not marks:
            raise ValueError(f"{opcode.name} without a mark")
        height = marks.pop()
        below = taken.index("mark")
        kept = height - below
    else:
        kept = len(stack) - len(taken)
    if kept < 0:
        raise ValueError(f"{opcode.name} takes more than there is")
    base = height if "mark" in taken else len(stack) - 2 if opcode.name == "SETITEM" else kept
    del stack[kept:]
    stack.extend([None] * len(opcode.stack_after))
    return base


FAMILY = Family(
    name="qwen2_5_omni",
    architectures=frozenset({"Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"}),
    graph=graph,
    stages_module="segue.models.omni.qwen2_5_omni.stages",
    reference_module="segue.models.omni.qwen2_5_omni.reference",
    voices=voices,
    options=frozenset({"use_audio_in_video"}),
    stage_keys=frozenset({"lora", "quantization"}),
    tiny_module="segue.models.omni.qwen2_5_omni.tiny.presets",
    tiny_names=("qwen2.5-omni",),
)
