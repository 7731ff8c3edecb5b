"""`segue tiny bert-cross-encoder | qwen3-reranker`: write a small cross-encoder in its published format."""

from __future__ import annotations

from functools import partial

from segue.models.family import TinyPreset
from segue.models.shared.tiny.classifiers import BERT, QWEN3, SIZES, make_classifier

_ONE = {"num_labels": 1}
_SMALL = {"bert-cross-encoder": (BERT, _ONE), "qwen3-reranker": (QWEN3, _ONE)}

PRESETS = {name: TinyPreset(SIZES, partial(make_classifier, small, labels)) for name, (small, labels) in _SMALL.items()}
