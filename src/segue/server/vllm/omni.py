"""Converts the parameters of vllm-omni's clients in a chat completion to this server's own."""

from __future__ import annotations

from typing import Any

from segue.graph.parts import is_built_in
from segue.messages.errors import InvalidRequest, shown, wrong
from segue.messages.sampling import sampling_from
from segue.orchestrator.service import ModelCard
from segue.server.generation.parameters import MAX_VOCAB
from segue.server.http.errors import Unsupported

_SAMPLING = "sampling_params_list"
_PROCESSOR = "mm_processor_kwargs"
_EXTRA = "extra_body"
_ALSO = {"num_outputs_per_prompt": "num_images_per_prompt"}
"""vllm-omni's names within `extra_body` → this server's names."""


def unwrapped(values: dict[str, Any], card: ModelCard) -> dict[str, Any]:
    """The body with the keys of `extra_body` at its top, if the model makes images: vllm-omni's image clients send it
    literally. For other models, `extra_body` is an argument of OpenAI's client that was sent by mistake.

    Raises `InvalidRequest`.
    """
    extra = values.get(_EXTRA)
    if extra is None:
        return values
    if "image" not in card.gives:
        raise InvalidRequest(
            f"{_EXTRA} is {shown(extra)}; put its keys at the top level (it is an argument of OpenAI's client)",
            field=_EXTRA,
        )
    if not isinstance(extra, dict):
        raise wrong(_EXTRA, extra, "an object")
    given: dict[str, Any] = extra
    top = {name: value for name, value in values.items() if name != _EXTRA}
    for name, value in given.items():
        called = _ALSO.get(name, name)
        if value is None:  # not given, and the name may be unknown
            top.setdefault(called, None)
            continue
        if top.get(called) is not None:
            raise InvalidRequest(f"{_EXTRA}.{name} and {called} are given; give one", field=f"{_EXTRA}.{name}")
        top[called] = value
    return top


def with_processor_options(
    options: dict[str, Any] | None, processor: dict[str, Any] | None, card: ModelCard
) -> dict[str, Any]:
    """`options`, merged with `mm_processor_kwargs` of the same names. Raises `InvalidRequest`."""
    merged = dict(options or {})
    for name, value in (processor or {}).items():
        if value is None:
            continue
        at = f"{_PROCESSOR}.{name}"
        if name not in card.options:
            known = f"it takes the options {', '.join(sorted(card.options))}" if card.options else "it takes none"
            raise Unsupported(
                f"{at} is {shown(value)}, which this model does not take ({known}); leave it out", field=at
            )
        if merged.get(name) not in (None, value):
            raise InvalidRequest(f"{at} and options.{name} are given and differ; give one", field=at)
        merged[name] = value
    return merged


def sampling_by_stage(
    listed: list[dict[str, Any] | None], card: ModelCard
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(`sampling`, stages → the client's names) from a `sampling_params_list`: an entry for each stage from the first
    one that samples. Entries of stages that do not sample are checked and ignored, as in vllm-omni. Raises
    `InvalidRequest`."""
    if not card.sampling_stages:
        raise Unsupported(f"{_SAMPLING} is given, but this model has no stage that samples", field=_SAMPLING)
    first = card.stages.index(card.sampling_stages[0])
    stages = [stage for stage in card.stages[first:] if not is_built_in(stage)]
    if len(listed) > len(stages):
        raise InvalidRequest(
            f"{_SAMPLING} has {len(listed)} entries; there is one for each of: {', '.join(stages)}", field=_SAMPLING
        )
    sampling: dict[str, dict[str, Any]] = {}
    written: dict[str, str] = {}
    for index, (stage, values) in enumerate(zip(stages, listed, strict=False)):
        if values is None:
            continue
        params = sampling_from(values, at := f"{_SAMPLING}[{index}]", card.limits)
        if stage not in card.sampling_stages:
            continue
        # such lists are written for the published checkpoint: stop tokens that this checkpoint lacks have no effect
        end = card.vocab_sizes.get(stage, MAX_VOCAB)
        stops = [token for token in params.stop_token_ids or () if 0 <= token < end]
        sampling[stage] = {**values, "stop_token_ids": stops or None}
        written[f"sampling.{stage}"] = at
    return sampling, written
