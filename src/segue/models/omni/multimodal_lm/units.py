"""Split a prompt's media into the encoder's work items (units): one medium if the processor's tensors can be split by
medium, else all media of a kind.

p patches, n placeholder tokens, m media of one kind in one prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from segue.engines.contract import Payload
from segue.models.omni.multimodal_lm.processor import Processed
from segue.models.shared.encoder_cache import add_content

_GRID = "grid_thw"
"""Suffix of the name of [m, 3] sizes in patches; such models concatenate the patches of all media."""


def units_of(processed: Processed, count: Mapping[str, int], *, split: bool = True) -> list[Payload]:
    """The units of a prompt, kind by kind. `count`: media per kind; `split`: by medium, if possible.

    A unit: `{"kind", "hash", "places": LongTensor [n] in the prompt, "ids": LongTensor [n] there, "tensors": {…},
    "alone": bool}`. `alone`: it must not share a call with others. Equal hashes mean equal ids and tensors.
    """
    units = []
    for kind, tensors in processed.tensors.items():
        places = processed.places(kind)
        sizes = processed.counts.get(kind)
        parts = _split(tensors, count[kind]) if split else None
        if parts is None or (count[kind] > 1 and (sizes is None or sum(sizes) != len(places))):
            parts, sizes = [tensors], None
        borders = np.cumsum([0, *(sizes if sizes is not None and len(parts) > 1 else [len(places)])]).tolist()
        for part, (start, stop) in zip(parts, pairwise(borders), strict=True):
            own = places[start:stop]
            ids = [processed.ids[place] for place in own]
            units.append(
                {
                    "kind": kind,
                    "hash": _hash(kind, ids, part),
                    "places": torch.tensor(own, dtype=torch.long),
                    "ids": torch.tensor(ids, dtype=torch.long),
                    "tensors": part,
                    "alone": len(parts) != count[kind] or not _all_tensors(part),
                }
            )
    return units


def without_tensors(unit: Payload) -> Payload:
    """The entries of a unit that the language model needs."""
    return {key: unit[key] for key in ("kind", "hash", "places")}


def _split(tensors: dict[str, Any], count: int) -> list[dict[str, Any]] | None:
    """Split tensors by medium; None if the shapes do not show how."""
    if count == 1:
        return [tensors]
    if not _all_tensors(tensors):
        return None
    grids = next((value for key, value in tensors.items() if key.endswith(_GRID)), None)
    patches = None if grids is None else grids.prod(-1).tolist()
    parts: list[dict[str, Any]] = [{} for _ in range(count)]
    for key, value in tensors.items():
        if value.ndim and len(value) == count:
            pieces = value.split(1)
        elif patches is not None and len(patches) == count and value.ndim and len(value) == sum(patches):
            pieces = value.split(patches)
        else:
            return None
        for part, piece in zip(parts, pieces, strict=True):
            part[key] = piece
    return parts


def _all_tensors(tensors: dict[str, Any]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in tensors.values())


def _hash(kind: str, ids: list[int], tensors: dict[str, Any]) -> bytes:
    digest = hashlib.blake2b(repr((kind, ids)).encode(), digest_size=16)
    for key in sorted(tensors):
        digest.update(key.encode())
        add_content(digest, tensors[key])
    return digest.digest()
