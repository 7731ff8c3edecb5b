"""Run transformers' own text classifier, as the reference for Segue's results.

This module reads and applies the activation itself, like `transformers.TextClassificationPipeline`; it shares no code
with the stage.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from segue.models.shared.library import AutoModelForSequenceClassification
from segue.models.shared.reference import Library, Reference, TextModel


def load(library: Library) -> Reference:
    problem = json.loads((library.model_dir / "config.json").read_text()).get("problem_type")

    def head(out: Any, mask: torch.Tensor) -> torch.Tensor:
        logits = out.logits[0].float()
        if problem == "regression":
            return logits
        if problem == "multi_label_classification" or len(logits) == 1:
            return 1 / (1 + (-logits).exp())
        raised = (logits - logits.max()).exp()
        return raised / raised.sum()

    return TextModel(library, AutoModelForSequenceClassification, head)
