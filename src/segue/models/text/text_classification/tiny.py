"""`segue tiny bert-classifier | qwen3-classifier`: write a small classifier in its published format."""

from __future__ import annotations

from functools import partial
from typing import Any

from segue.models.family import TinyPreset
from segue.models.shared.tiny.classifiers import BERT, QWEN3, SIZES, make_classifier

_MOODS = ("calm", "glad", "sad", "angry")
_TOPICS = ("sea", "house", "road")


def _labels(names: tuple[str, ...], problem_type: str) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
        "problem_type": problem_type,
    }


_SMALL = {
    "bert-classifier": (BERT, _labels(_MOODS, "single_label_classification")),
    "qwen3-classifier": (QWEN3, _labels(_TOPICS, "multi_label_classification")),
}

PRESETS = {name: TinyPreset(SIZES, partial(make_classifier, small, labels)) for name, (small, labels) in _SMALL.items()}
