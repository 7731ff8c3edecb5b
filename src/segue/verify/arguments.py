"""The arguments of `segue verify`, apart from its implementation, so that other commands need not import that."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("model", help="directory of a checkpoint, or OWNER/MODEL in the cache of Hugging Face's hub")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=["float32", "bfloat16", "float16"],
        help="compare only this dtype; may be given repeatedly; default: the checkpoint's own, and float32",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="device of both sides; default: cuda if there is a GPU",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests, smaller images")
    parser.add_argument("--only", metavar="TEXT", help="only requests with this in their name, e.g. image")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report here, for a bug report")
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment (YAML) of Segue's side")
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="processes per replica of Segue's side")
    parser.add_argument(
        "--against", metavar="DIR", help="let the library read this checkpoint instead; default: the same one"
    )
