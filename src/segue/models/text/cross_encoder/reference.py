"""Run transformers' own cross-encoder, as the reference for Segue's results.

This module reads and applies the activation itself, like `sentence_transformers.CrossEncoder`; it shares no code with
the stage.
"""

from __future__ import annotations

import json

from segue.models.shared.library import AutoModelForSequenceClassification
from segue.models.shared.reference import Library, Reference, TextModel


def load(library: Library) -> Reference:
    config = json.loads((library.model_dir / "config.json").read_text())
    newer = (config.get("sentence_transformers") or {}).get("activation_fn")
    named = str(newer or config.get("sbert_ce_default_activation_function") or "torch.nn.modules.activation.Sigmoid")
    if not named.endswith((".Sigmoid", ".Identity")):
        raise ValueError(f"the activation is {named!r}; Sigmoid and Identity are compared")
    squashed = named.endswith(".Sigmoid")
    return TextModel(
        library,
        AutoModelForSequenceClassification,
        lambda out, mask: 1 / (1 + (-out.logits[0].float()).exp()) if squashed else out.logits[0].float(),
    )
