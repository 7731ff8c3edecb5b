"""Converts the parameters of a request into sampling parameters per stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, nearest, shown, wrong
from segue.messages.sampling import (
    MAX_OUTPUTS,
    SamplingParams,
    StructuredOutput,
    check_sampling,
    check_token_ids,
    sampling_from,
)
from segue.orchestrator.service import ModelCard
from segue.server.generation.format import GUIDED, structured_output
from segue.server.generation.parameters import MAX_VOCAB, CommonBody, as_written, names_at_top

MAX_CHOICES = 16
"""Most answers if each is a separate request."""
_TO_TEXT_STAGE = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in CommonBody.__struct_fields__ and name not in ("seed", "n", "structured_outputs")
)
"""Top-level parameters that map unchanged to the text stage's sampling. The seed belongs to the request; `n` becomes
several requests, or one request with several outputs."""


def sampling_of(body: CommonBody, card: ModelCard, named: Mapping[str, str], **own: Any) -> dict[str, SamplingParams]:
    """Sampling by stage. `own`: fields of the text stage that the endpoint has in another form; None: not given.
    `named`: the client's names for them. Raises `InvalidRequest`."""
    by_stage = stage_sampling(body.sampling, card)
    top = _top_level(body, card, own, names_at_top(body, named))
    if top is None or card.text_stage is None:
        return by_stage
    # parameters under the stage's name override those at the top
    by_stage[card.text_stage] = by_stage.get(card.text_stage, SamplingParams()).over(top)
    return by_stage


def stage_sampling(sampling: Mapping[str, dict[str, Any]] | None, card: ModelCard) -> dict[str, SamplingParams]:
    """The body's `sampling`, by stage. Raises `InvalidRequest`."""
    by_stage: dict[str, SamplingParams] = {}
    for stage, values in (sampling or {}).items():
        if stage not in card.sampling_stages:
            hint = nearest(stage, card.sampling_stages)
            raise InvalidRequest(f"sampling names {shown(stage)}, no stage that samples{hint}", field="sampling")
        by_stage[stage] = sampling_from(values, f"sampling.{stage}", card.limits)
        if by_stage[stage].n is not None:
            raise InvalidRequest(
                f"sampling.{stage}.n is {by_stage[stage].n}; give n at the top of the request",
                field=f"sampling.{stage}.n",
            )
        check_token_ids(by_stage[stage], card.vocab_sizes.get(stage, MAX_VOCAB), f"sampling.{stage}.")
    return by_stage


_PREFIX = "request"


def _top_level(
    body: CommonBody, card: ModelCard, own: dict[str, Any], names: Mapping[str, str]
) -> SamplingParams | None:
    """The text stage's parameters at the top of the body, or None. `names`: the client's names for them."""
    values = msgspec.structs.asdict(body)
    stated = {name: values[name] for name in _TO_TEXT_STAGE} | own
    given = {name: value for name, value in stated.items() if value is not None}
    if body.use_beam_search and body.beam_width is None:
        given["beam_width"] = given.pop("best_of", choices_of(body))
    if (form := _form(body, own.get("structured_outputs"))) is not None:
        given["structured_outputs"] = msgspec.to_builtins(form)
    for token in body.logit_bias or {}:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise InvalidRequest(f"logit_bias has {shown(token)}, which is no token id", field="logit_bias")
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    if not given:
        return None
    if card.text_stage is None:
        name = names.get(next(iter(given)), next(iter(given)))
        raise InvalidRequest(f"{name} is given, but this model has no stage that makes text", field=name)
    try:
        params = _checked_at_top(given, card)
        check_token_ids(params, card.vocab_sizes.get(card.text_stage, MAX_VOCAB), "")
    except InvalidRequest as error:
        raise as_written(error, names) from error
    return params


def _form(body: CommonBody, of_tools: StructuredOutput | None) -> StructuredOutput | None:
    """The form of the text that the body or a tool call requires."""
    values = msgspec.structs.asdict(body)
    guided = {name: values[name] for name in GUIDED if values[name] is not None}
    form = structured_output(body.response_format, body.structured_outputs, guided)
    # response_format applies to text outside calls; a required call leaves no such text
    if of_tools is not None and (body.structured_outputs is not None or guided):
        raise InvalidRequest(
            "tool_choice asks for a call, and another parameter for another form of the text; give one",
            field="tool_choice",
        )
    return of_tools or form


def _checked_at_top(given: SamplingParams | dict[str, Any], card: ModelCard) -> SamplingParams:
    """Check parameters from the top of the body, so that errors name them without a stage."""
    try:
        if isinstance(given, dict):
            return sampling_from(given, _PREFIX, card.limits)
        check_sampling(given, _PREFIX, card.limits)
        return given
    except InvalidRequest as error:
        field = (error.field or "").removeprefix(f"{_PREFIX}.")
        raise type(error)(error.message.removeprefix(f"{_PREFIX}."), field=field) from error


def choices_of(body: CommonBody, *, together: bool = True) -> int:
    """Number of answers per prompt. `together`: one request makes all of them. Raises `InvalidRequest`."""
    n, most = 1 if body.n is None else body.n, MAX_OUTPUTS if together else MAX_CHOICES
    if not 1 <= n <= most:
        raise wrong("n", n, f"from 1 to {most}")
    return n


def together(sampling: dict[str, SamplingParams], n: int, card: ModelCard) -> dict[str, SamplingParams]:
    """Sampling for one request that makes all choices and computes its prompt once. It samples the same tokens as `n`
    requests with their own seeds."""
    assert card.text_stage is not None
    several = SamplingParams(n=n).over(sampling.get(card.text_stage, SamplingParams()))
    _checked_at_top(several, card)
    return {**sampling, card.text_stage: several}


def seeds_of(body: CommonBody, n: int) -> list[int | None]:
    """One seed per request: the given one and its successors (modulo 2⁶⁴), or None, which is drawn at admission."""
    if body.seed is None:
        return [None] * n
    if not -(2**63) <= body.seed < 2**64:
        raise wrong("seed", body.seed, "a 64-bit integer")
    return [seed if (seed := body.seed + index) < 2**64 else seed - 2**64 for index in range(n)]
