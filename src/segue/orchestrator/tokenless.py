"""What a deployment without a tokenizer (`skip_tokenizer_init`) refuses: its requests and replies are token ids.

Optional reading: only for checkpoints without a tokenizer.
"""

from __future__ import annotations

from segue.graph.deployment.deployment import Plan
from segue.graph.parts import TOKENS
from segue.messages.errors import ConfigError, InvalidRequest
from segue.messages.request import Request
from segue.messages.sampling import SamplingParams
from segue.models.family import Family

KEY = "skip_tokenizer_init"
_REASON = f"this deployment loads no tokenizer ({KEY})"
_OF_TEXT = ("stop", "bad_words", "structured_outputs", "thinking_token_budget")
"""Sampling parameters that are about text."""


def check_tokenless_plan(family: Family, plan: Plan) -> None:
    """Raise `ConfigError` if a deployment without a tokenizer is of a family, or has sampling parameters, that need
    one."""
    if not plan.skip_tokenizer_init:
        return
    if not family.skips_tokenizer:
        raise ConfigError(
            f"{KEY} is true, but the family {family.name!r} needs the checkpoint's tokenizer; leave it out", field=KEY
        )
    for stage, stage_plan in plan.stages.items():
        if (name := _needs_text(stage_plan.sampling)) is not None:
            field = f"stages.{stage}.sampling.{name}"
            raise ConfigError(f"{field} is set, but {KEY} is true: there is no text to apply it to", field=field)


def check_tokenless(request: Request) -> None:
    """Raise `InvalidRequest` for what needs a tokenizer."""
    if request.prompt is not None:
        raise refusal("prompt", "is text", "send prompt_token_ids")
    if request.prompt_token_ids is None and request.messages:
        raise refusal("messages", "are text", "send prompt_token_ids")
    if media := request.media():
        field = media[0].field or "messages"
        raise refusal(field, "is given, but the processor of media needs a tokenizer too", "send token ids alone")
    if TOKENS in request.modalities:
        raise refusal("modalities", f"has {TOKENS!r}", "leave it out")
    for stage, params in request.sampling.items():
        if (name := _needs_text(params)) is not None:
            raise refusal(f"sampling.{stage}.{name}", "is set", "leave it out, or use stop_token_ids")


def refusal(field: str, what: str, right: str) -> InvalidRequest:
    """The error about a field that needs a tokenizer."""
    return InvalidRequest(f"{field} {what}; {_REASON}: {right}", field=field)


def _needs_text(params: SamplingParams) -> str | None:
    """The first of the parameters that is set."""
    given = (params.stop, params.bad_words, params.structured_outputs, params.thinking_token_budget)
    return next((name for name, value in zip(_OF_TEXT, given, strict=True) if value), None)
