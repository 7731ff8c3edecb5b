"""Sampling parameters of one stage. A field left at None takes the family's own default, then the library's."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, nearest

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy decoding."""


class StructuredOutput(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What form the text must have; exactly one field is set (vLLM's `structured_outputs`)."""

    json: dict[str, Any] | str | None = None
    """A JSON schema, as an object or as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """EBNF, as xgrammar reads it (GBNF)."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How an autoregressive stage picks tokens. None means "as the family's own `generate` does"."""

    temperature: float | None = None
    top_k: int | None = None
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, §4.1)."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    """Token ids that end the output, besides the family's end tokens."""
    ignore_eos: bool | None = None
    """Do not end at the family's end tokens; `stop_token_ids` still end."""
    suppress_tokens: list[int] | None = None
    """Token ids that are never produced."""
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    """Only these are ever produced."""
    bad_words: list[str] | None = None
    """Texts that are never produced."""
    structured_outputs: StructuredOutput | None = None
    logprobs: int | None = None
    """Report the log-probability of each generated token, and of so many most likely ones in its place; -1: of all."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many of the prompt's last tokens."""
    n: int | None = None
    """Outputs of one prompt, sampled independently; output i has the seed `seed + i`."""
    best_of: int | None = None
    """Sample so many, give the `n` with the highest mean log-probability."""
    beam_width: int | None = None
    """Beam search with so many beams; the `n` best are given (transformers' `num_beams`)."""
    length_penalty: float | None = None
    """Of beam search: scores are divided by length to this power (Wu et al., 2016, §7 in transformers' form)."""
    early_stopping: bool | None = None
    """Of beam search: end as soon as there are `beam_width` finished candidates."""

    @property
    def greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with `defaults` where a field is unset."""
        merged = {
            name: mine if (mine := getattr(self, name)) is not None else getattr(defaults, name)
            for name in self.__struct_fields__
        }
        return SamplingParams(**merged)


FALLBACK = SamplingParams(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    min_tokens=0,
    stop=[],
    stop_token_ids=[],
    ignore_eos=False,
    suppress_tokens=[],
    logit_bias={},
    include_stop_str_in_output=False,
    skip_special_tokens=True,
    bad_words=[],
    n=1,
    length_penalty=1.0,
    early_stopping=False,
)
"""What a field means where neither the request nor the family says anything (`max_tokens`: up to the context)."""

# field → (lowest, highest, "what would be right"); bounds are OpenAI's and vLLM's
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 2.0, "a number from 0 to 2"),
    "top_k": (-1, 2**31 - 1, "an integer, -1 or 0 for all tokens"),
    "min_p": (0.0, 1.0, "a number from 0 to 1"),
    "presence_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "max_tokens": (1, 2**31 - 1, "an integer from 1 to 2147483647"),
    "min_tokens": (0, 2**31 - 1, "an integer from 0 to 2147483647"),
    "seed": (-(2**63), 2**64 - 1, "a 64-bit integer"),
}


def misfit(error: Exception, field: str = "") -> InvalidRequest:
    """The refusal of a value that does not fit its type, from what msgspec says of it; `field`: what was converted."""
    what, _, place = str(error).partition(" - at `$")
    path = f"{field}{place.rstrip('`')}".lstrip(".")
    return InvalidRequest(f"{path}: {what}" if path else what, field=path or None)


def check_sampling(params: SamplingParams, field: str) -> None:
    """Raise `InvalidRequest` naming field, value and what would be right."""
    try:
        msgspec.convert(msgspec.to_builtins(params), SamplingParams)  # nothing holds Python callers to the types
    except (msgspec.ValidationError, TypeError) as error:
        raise misfit(error, field) from error
    for name, (low, high, right) in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:  # NaN is in no range
            raise InvalidRequest(f"{field}.{name} is {value!r}; it must be {right}", field=f"{field}.{name}")
    if params.top_p is not None and not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest(
            f"{field}.top_p is {params.top_p!r}; it must be above 0 and at most 1", field=f"{field}.top_p"
        )
    if params.repetition_penalty is not None and not (0.0 < params.repetition_penalty <= 10.0):
        raise InvalidRequest(
            f"{field}.repetition_penalty is {params.repetition_penalty!r}; it must be above 0 and at most 10",
            field=f"{field}.repetition_penalty",
        )
    if params.min_tokens and params.max_tokens and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"{field}.min_tokens is {params.min_tokens}, more than max_tokens ({params.max_tokens})",
            field=f"{field}.min_tokens",
        )
    for bias in (params.logit_bias or {}).values():
        if not (math.isfinite(bias) and -100 <= bias <= 100):
            raise InvalidRequest(
                f"{field}.logit_bias has {bias!r}; a bias must be from -100 to 100", field=f"{field}.logit_bias"
            )
    if any(not text for text in params.stop or []):
        raise InvalidRequest(f"{field}.stop has an empty string; leave it out", field=f"{field}.stop")


def check_token_ids(params: SamplingParams, vocab_size: int, field: str) -> None:
    """Raise `InvalidRequest` for a token id that a stage does not have, or where none is left to choose.

    `field`: what stands before the parameter's name, dot included.
    """
    lists = {
        "stop_token_ids": params.stop_token_ids,
        "suppress_tokens": params.suppress_tokens,
        "logit_bias": params.logit_bias,
    }
    for name, ids in lists.items():
        for token in ids or ():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{field}{name} has {token}, which is no token id; they are from 0 to {vocab_size - 1}",
                    field=f"{field}{name}",
                )
    forbidden = set(params.suppress_tokens or ())
    if len(forbidden) == vocab_size:
        raise InvalidRequest(f"{field}suppress_tokens leaves no token to choose", field=f"{field}suppress_tokens")
    if params.min_tokens and len(forbidden.union(params.stop_token_ids or ())) == vocab_size:
        raise InvalidRequest(
            f"{field}stop_token_ids leaves no token to choose until min_tokens ({params.min_tokens})",
            field=f"{field}stop_token_ids",
        )


def sampling_from(values: dict[str, Any], field: str) -> SamplingParams:
    """Parameters from a JSON object; unknown names and wrong types are named with their nearest neighbour."""
    for name in values:
        if name not in SamplingParams.__struct_fields__:
            raise InvalidRequest(
                f"{field} has no parameter {name!r}{nearest(name, SamplingParams.__struct_fields__)}",
                field=f"{field}.{name}",
            )
    try:
        # JSON object keys are text: logit_bias arrives as {"123": 1.0}
        params = msgspec.convert(values, SamplingParams, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise misfit(error, field) from error
    check_sampling(params, field)
    return params
