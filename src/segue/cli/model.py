"""The command-line arguments shared by all commands that run a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from segue.graph.deployment.options import QUANTIZATIONS
from segue.graph.kinds.autoregressive import KV_DTYPES, SCHEDULINGS

_SETTINGS = (
    *("model", "config", "dtype", "speculation", "load_format", "deterministic", "tensor_parallel", "quantization"),
    *("kv_dtype", "scheduling", "skip_tokenizer_init", "name"),
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of commands that run a model."""
    parser.add_argument(
        "model",
        help="directory of a checkpoint, OWNER/MODEL in the cache of Hugging Face's hub, or a file *.py with a graph "
        "of models",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment (YAML); default: by the hardware")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of weights and arithmetic; default: float32 on a CPU, else bfloat16",
    )
    parser.add_argument(
        "--speculation",
        type=_mapping,
        metavar="JSON",
        help='speculative decoding, e.g. {"method": "ngram"}; default: none',
    )
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="convert the weights to this while loading; default: none"
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="dtype of the KV cache; default: as computed")
    parser.add_argument("--scheduling", choices=SCHEDULINGS, help="order of requests; default: fcfs")
    parser.add_argument(
        "--load-format",
        choices=["auto", "dummy"],
        default="auto",
        help="dummy: random weights of the checkpoint's shape, without its weight files; default: %(default)s",
    )
    parser.add_argument("--deterministic", action="store_true", help="compute bitwise equal logits in any batch")
    parser.add_argument(
        "--skip-tokenizer-init", action="store_true", help="load no tokenizer: prompts and replies are token ids"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="processes per replica, each with a part of the weights; default: 1",
    )
    parser.add_argument("--name", help="clients' name of the model; default: the directory's, or OWNER/MODEL")


def model_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return these arguments as keyword arguments of `Omni`."""
    given = vars(arguments)
    return {name: given[name] for name in _SETTINGS}


def _mapping(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
