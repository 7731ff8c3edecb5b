"""The key `speculation` of an autoregressive stage: who guesses tokens, and how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from segue.graph.section import Section, wrong
from segue.messages.errors import ConfigError

METHODS = ("ngram", "draft", "eagle", "medusa", "mtp")
WITH_MODEL = ("draft", "eagle", "medusa")
"""Methods that need a checkpoint of their own."""
SPECULATION_KEYS = ("method", "tokens", "model", "ngram_min", "ngram_max", "adaptive")
_FOREIGN = {
    "num_speculative_tokens": "tokens",
    "prompt_lookup_max": "ngram_max",
    "prompt_lookup_min": "ngram_min",
}
"""What vLLM's `--speculative-config` calls a key of ours, for the error message."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """Speculative decoding of one stage."""

    method: str
    """`ngram` (prompt lookup), `draft` (a smaller model), `eagle`, `medusa` (heads trained for the model), `mtp` (the
    model's own multi-token-prediction module)."""
    tokens: int = 4
    """Most drafts per request and step."""
    model: str | None = None
    """Directory of the checkpoint of `draft`, `eagle` or `medusa`."""
    ngram_min: int = 2
    """Prompt lookup: shortest ending that is looked up."""
    ngram_max: int = 4
    """Prompt lookup: longest ending that is looked up."""
    adaptive: bool = True
    """Switch off for a request while it does not pay."""


def speculation_of(stage: Section) -> SpeculationPlan | None:
    """What a stage's section says; None where it says nothing. Raises `ConfigError` naming key and value."""
    path, value = stage.find("speculation")
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong(path, value, f"a mapping with a method: one of {', '.join(METHODS)}")
    section = Section(path, value, SPECULATION_KEYS, foreign=_FOREIGN)
    if section.values.get("method") is None:
        raise ConfigError(f"{path} has no method; it must be one of {', '.join(METHODS)}", field=section.at("method"))
    method = section.choice("method", "", METHODS)
    model = section.values.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong(section.at("model"), model, "the directory of a checkpoint")
    if model is None and method in WITH_MODEL:
        raise ConfigError(f"{path}.method is {method!r}, which needs {path}.model", field=section.at("model"))
    if model is not None and method not in WITH_MODEL:
        raise ConfigError(
            f"{path}.model is {model!r}, but the method {method!r} takes no model", field=section.at("model")
        )
    for key in ("ngram_min", "ngram_max"):
        if section.values.get(key) is not None and method != "ngram":
            raise ConfigError(f"{section.at(key)} is for the method 'ngram'; it is {method!r}", field=section.at(key))
    plan = SpeculationPlan(
        method=method,
        tokens=section.integer("tokens", 4),
        model=model,
        ngram_min=section.integer("ngram_min", min(2, section.integer("ngram_max", 2))),
        ngram_max=section.integer("ngram_max", max(4, section.integer("ngram_min", 4))),
        adaptive=section.flag("adaptive", True),
    )
    if plan.ngram_min > plan.ngram_max:
        raise wrong(section.at("ngram_min"), plan.ngram_min, f"at most ngram_max ({plan.ngram_max})")
    return plan
