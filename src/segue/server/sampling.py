"""What the parameters of a request mean for the sampling of each stage."""

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
from segue.server.chat_format import GUIDED, structured_output
from segue.server.parameters import MAX_VOCAB, CommonBody, as_written, names_at_top

MAX_CHOICES = 16
"""Where each answer is a request of its own."""
MAX_STOPS = 16
_TO_TEXT_STAGE = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in CommonBody.__struct_fields__ and name not in ("seed", "n", "structured_outputs")
)
"""Top-level parameters that are the text stage's sampling as they stand. The seed is the request's own; n: as many
requests, or set where one makes all."""


def sampling_of(body: CommonBody, card: ModelCard, named: Mapping[str, str], **own: Any) -> dict[str, SamplingParams]:
    """Sampling by stage. `own`: fields of the text stage's that the endpoint has in a form of its own; None: not given.
    `named`: what the client calls these. Raises `InvalidRequest`."""
    by_stage: dict[str, SamplingParams] = {}
    for stage, values in (body.sampling or {}).items():
        if stage not in card.sampling_stages:
            hint = nearest(stage, card.sampling_stages)
            raise InvalidRequest(f"sampling names {shown(stage)}, no stage that samples{hint}", field="sampling")
        by_stage[stage] = sampling_from(values, f"sampling.{stage}")
        if by_stage[stage].n is not None:
            raise InvalidRequest(
                f"sampling.{stage}.n is {by_stage[stage].n}; give n at the top of the request",
                field=f"sampling.{stage}.n",
            )
        check_token_ids(by_stage[stage], card.vocab_sizes.get(stage, MAX_VOCAB), f"sampling.{stage}.")
    top = _top_level(body, card, own, names_at_top(body, named))
    if top is None or card.text_stage is None:
        return by_stage
    # what is said of the stage by name is the more special
    by_stage[card.text_stage] = by_stage.get(card.text_stage, SamplingParams()).over(top)
    return by_stage


_PREFIX = "request"


def _top_level(
    body: CommonBody, card: ModelCard, own: dict[str, Any], names: Mapping[str, str]
) -> SamplingParams | None:
    """The text stage's parameters as they stand at the top of the body; None where there are none. `names`: what the
    client calls them."""
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
    elif body.stop is not None and len(body.stop) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(body.stop)} strings; at most {MAX_STOPS} are taken", field="stop")
    if not given:
        return None
    if card.text_stage is None:
        name = names.get(next(iter(given)), next(iter(given)))
        raise InvalidRequest(f"{name} is given, but this model has no stage that makes text", field=name)
    try:
        params = _checked_at_top(given)
        check_token_ids(params, card.vocab_sizes.get(card.text_stage, MAX_VOCAB), "")
    except InvalidRequest as error:
        raise as_written(error, names) from error
    return params


def _form(body: CommonBody, of_tools: StructuredOutput | None) -> StructuredOutput | None:
    """The form of the text, as the body asks for it or as a tool call has it."""
    values = msgspec.structs.asdict(body)
    guided = {name: values[name] for name in GUIDED if values[name] is not None}
    form = structured_output(body.response_format, body.structured_outputs, guided)
    # a response_format is of what is said beside calls, which is nothing where a call is asked for
    if of_tools is not None and (body.structured_outputs is not None or guided):
        raise InvalidRequest(
            "tool_choice asks for a call, and another parameter for another form of the text; give one",
            field="tool_choice",
        )
    return of_tools or form


def _checked_at_top(given: SamplingParams | dict[str, Any]) -> SamplingParams:
    """Parameters that stand at the top of the body, under no name."""
    try:
        if isinstance(given, dict):
            return sampling_from(given, _PREFIX)
        check_sampling(given, _PREFIX)
        return given
    except InvalidRequest as error:
        field = (error.field or "").removeprefix(f"{_PREFIX}.")
        raise type(error)(error.message.removeprefix(f"{_PREFIX}."), field=field) from error


def choices_of(body: CommonBody, *, together: bool = True) -> int:
    """How many answers each prompt gets. `together`: one request makes all of them. Raises `InvalidRequest`."""
    n, most = 1 if body.n is None else body.n, MAX_OUTPUTS if together else MAX_CHOICES
    if not 1 <= n <= most:
        raise wrong("n", n, f"from 1 to {most}")
    return n


def together(sampling: dict[str, SamplingParams], n: int, card: ModelCard) -> dict[str, SamplingParams]:
    """One request that makes all choices: its prompt is computed once. Draws are those of `n` requests with their own
    seeds."""
    assert card.text_stage is not None
    several = SamplingParams(n=n).over(sampling.get(card.text_stage, SamplingParams()))
    _checked_at_top(several)
    return {**sampling, card.text_stage: several}


def seeds_of(body: CommonBody, n: int) -> list[int | None]:
    """One per request: the given seed and its successors (wrapping at 64 bits), or None: given at admission."""
    if body.seed is None:
        return [None] * n
    if not -(2**63) <= body.seed < 2**64:
        raise wrong("seed", body.seed, "a 64-bit integer")
    return [seed if (seed := body.seed + index) < 2**64 else seed - 2**64 for index in range(n)]
