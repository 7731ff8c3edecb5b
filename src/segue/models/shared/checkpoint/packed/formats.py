"""Find the format of packed weights from the `quantization_config` of a checkpoint's `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from segue.models.shared.checkpoint.packed.awq import Awq
from segue.models.shared.checkpoint.packed.bitsandbytes import Bitsandbytes4, Bitsandbytes8
from segue.models.shared.checkpoint.packed.compressed import Compressed
from segue.models.shared.checkpoint.packed.gptq import Gptq
from segue.models.shared.checkpoint.packed.reader import Format
from segue.models.shared.checkpoint.packed.torchao import Torchao
from segue.models.shared.checkpoint.packed.written import FIELD
from segue.models.shared.library import PreTrainedConfig

FORMATS: dict[str, Callable[[dict[str, Any], Path], Format]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": Compressed,
    "torchao": Torchao,
    "bitsandbytes_8bit": Bitsandbytes8,
    "bitsandbytes_4bit": Bitsandbytes4,
}
"""By `quant_method`, as in transformers: the reader of its tensors."""
_NAMES = (FIELD, "compression_config")
"""Names of the config entry; compressed-tensors formerly used the second."""


def written_in(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The quantisation entry of a config, of the whole model or of its text decoder."""
    for part in (config, config.get_text_config(decoder=True)):
        values = part.to_dict()
        for name in _NAMES:
            if values.get(name):
                return dict(values[name])
    return None


def format_of(written: dict[str, Any], path: Path) -> Format | None:
    """The reader of weights in this format; None if the library reads them. `path`: the config's. Raises
    `ConfigError`."""
    method = str(written.get("quant_method"))
    for bits in ("8bit", "4bit"):
        if written.get(f"load_in_{bits}"):
            method = f"bitsandbytes_{bits}"
    made = FORMATS.get(method)
    return None if made is None else made(written, path)


def without_it(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the same model with unquantised weights."""
    plain = deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        for name in _NAMES:
            vars(part).pop(name, None)
    return plain
