"""Sampling parameters of one stage: a field that is None takes the default of the deployment, the family, the
checkpoint or `FALLBACK`, in this order."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, nearest, wrong
from segue.messages.limits import DEFAULTS, RequestLimits, check_carried, check_lists

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy decoding."""
MAX_OUTPUTS = 128
"""Most outputs of one prompt, shown or not."""
MAX_BEAMS = 16
SIDES = ("left", "right")
"""Values of `truncation_side`."""
MAX_PATTERN = 1024
"""Tokens of the longest pattern that `repetition_detection` looks for."""
MAX_PATTERN_WORK = 10240
"""Bound on the number of pattern sizes times `min_count`, the worst-case number of comparisons after each token."""


class StructuredOutput(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The form that the text must have; exactly one of `FORMS` is set (vLLM's `structured_outputs`)."""

    json: dict[str, Any] | str | None = None
    """A JSON schema, as an object or as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """EBNF, as xgrammar reads it (GBNF)."""
    structural_tag: dict[str, Any] | str | None = None
    """Free text with constrained parts, in xgrammar's format or vLLM's older one."""
    disable_any_whitespace: bool | None = None
    """For `json` and `json_object`: one space after each comma and colon, and none elsewhere."""


FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields of `StructuredOutput` that specify a form."""


def form_of(asked: StructuredOutput) -> str | None:
    """Return which of `FORMS` is set, or None."""
    values = msgspec.structs.asdict(asked)
    return next((name for name in FORMS if values[name] not in (None, False)), None)


class RepetitionDetection(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """When a repetitive output ends (vLLM's `repetition_detection`): as soon as its last tokens are one pattern
    `min_count` times in a row."""

    max_pattern_size: int = 0
    """Tokens of the longest pattern; 0: no detection."""
    min_pattern_size: int = 0
    """Tokens of the shortest pattern; 0 means 1."""
    min_count: int = 0


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How an autoregressive stage picks tokens. None: the default (`merged`)."""

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
    """Token ids that end the output, in addition to the family's end tokens."""
    ignore_eos: bool | None = None
    """Do not end at the family's end tokens; `stop_token_ids` still end."""
    suppress_tokens: list[int] | None = None
    """Token ids that are never produced."""
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    """Only these tokens are ever produced."""
    bad_words: list[str] | None = None
    """Texts that are never produced."""
    structured_outputs: StructuredOutput | None = None
    logprobs: int | None = None
    """Report the log-probability of each generated token and of this many most likely tokens; -1: of all tokens."""
    prompt_logprobs: int | None = None
    """The same for each prompt token except the first."""
    logprob_token_ids: list[int] | None = None
    """Report at each position the log-probabilities of these tokens and of the generated one, not of the most likely
    ones."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens; -1: as many as the context holds."""
    truncation_side: str | None = None
    """Where `truncate_prompt_tokens` cuts: `left` (the default; the last tokens are kept) or `right`."""
    detokenize: bool | None = None
    """False: return ids, no text."""
    thinking_token_budget: int | None = None
    """Most reasoning tokens, after which the end-of-reasoning text is forced; -1: any number."""
    repetition_detection: RepetitionDetection | None = None
    """End an output that only repeats itself."""
    n: int | None = None
    """Outputs of one prompt, sampled independently; output i has the seed `seed + i`."""
    best_of: int | None = None
    """Sample this many outputs, return the `n` with the highest mean log-probability."""
    beam_width: int | None = None
    """Beam search with this many beams, of which the `n` best are returned (transformers' `num_beams`)."""
    length_penalty: float | None = None
    """For beam search: scores are divided by length to this power (Wu et al., 2016, §7 in transformers' form)."""
    speculate: bool | None = None
    """False: no speculative decoding for this request, if the deployment has it. The tokens are the same."""
    early_stopping: bool | None = None
    """For beam search: end as soon as there are `beam_width` finished candidates."""

    @property
    def greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """Return these parameters, with unset fields taken from `defaults`."""
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
    detokenize=True,
    bad_words=[],
    n=1,
    length_penalty=1.0,
    early_stopping=False,
    speculate=True,
)
"""Values of fields that neither the request nor the family sets (`max_tokens`: up to the context)."""


_SEED_STEP = 0x9E3779B97F4A7C15
"""Distance between the seeds of successive turns: odd, so that no two of 2^64 turns share a seed, and large, so that
the forks of a request (seed + i) share none with its turns."""


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn's draws; that of turn 0 is the request's own."""
    return (seed + turn * _SEED_STEP) % 2**64


def merged(
    *,
    request: SamplingParams | None = None,
    deployment: SamplingParams | None = None,
    family: SamplingParams | None = None,
    checkpoint: SamplingParams | None = None,
) -> SamplingParams:
    """Return the parameters that a stage samples with: each from the first source that sets it.

    `request`: for this stage; `deployment`: the stage's `sampling`; `family`: arguments of the family's own `generate`;
    `checkpoint`: its generation config. `FALLBACK` comes last.
    """
    params = SamplingParams()
    for source in (request, deployment, family, checkpoint, FALLBACK):
        params = params if source is None else params.over(source)
    return params


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
    "logprobs": (-1, 2**31 - 1, "an integer, -1 for all tokens"),
    "prompt_logprobs": (-1, 2**31 - 1, "an integer, -1 for all tokens"),
    "truncate_prompt_tokens": (-1, 2**31 - 1, "an integer from 1, or -1 for what the context holds"),
    "thinking_token_budget": (-1, 2**31 - 1, "an integer from 0, or -1 for any number"),
    "n": (1, MAX_OUTPUTS, f"an integer from 1 to {MAX_OUTPUTS}"),
    "best_of": (1, MAX_OUTPUTS, f"an integer from 1 to {MAX_OUTPUTS}"),
    "beam_width": (1, MAX_BEAMS, f"an integer from 1 to {MAX_BEAMS}"),
    "length_penalty": (-10.0, 10.0, "a number from -10 to 10"),
}


def misfit(error: Exception, field: str = "") -> InvalidRequest:
    """Turn msgspec's error about a value's type into an `InvalidRequest`; `field`: name of the converted value."""
    what, _, place = str(error).partition(" - at `$")
    path = f"{field}{place.rstrip('`')}".lstrip(".")
    return InvalidRequest(f"{path}: {what}" if path else what, field=path or None)


def check_sampling(params: SamplingParams, field: str, limits: RequestLimits = DEFAULTS) -> None:
    """Raise `InvalidRequest` naming field, value and what would be right."""
    check_lists(msgspec.structs.asdict(params), limits, f"{field}.")
    try:
        typed = msgspec.convert(msgspec.to_builtins(params), SamplingParams)  # Python does not enforce the types
    except (msgspec.ValidationError, TypeError) as error:
        raise misfit(error, field) from error
    for name, (low, high, right) in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:  # NaN is in no range
            raise wrong(f"{field}.{name}", value, right)
    if params.top_p is not None and not 0.0 < params.top_p <= 1.0:
        raise wrong(f"{field}.top_p", params.top_p, "above 0 and at most 1")
    if params.repetition_penalty is not None and not (0.0 < params.repetition_penalty <= 10.0):
        raise wrong(f"{field}.repetition_penalty", params.repetition_penalty, "above 0 and at most 10")
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
    _check_lists(params, field)
    _check_outputs(params, field)
    if typed.repetition_detection is not None:
        _check_repetition(typed.repetition_detection, f"{field}.repetition_detection")
        if params.beam_width is not None:
            raise InvalidRequest(
                f"{field}.repetition_detection cannot be combined with beam_width ({params.beam_width}); leave one "
                "of them out",
                field=f"{field}.repetition_detection",
            )
    if typed.structured_outputs is not None:
        check_structured(typed.structured_outputs, f"{field}.structured_outputs")


def _check_lists(params: SamplingParams, field: str) -> None:
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        if any(not text for text in texts or []):
            raise InvalidRequest(f"{field}.{name} has an empty string; leave it out", field=f"{field}.{name}")
    if params.truncate_prompt_tokens == 0:
        right = "an integer from 1, or -1 for what the context holds"
        raise wrong(f"{field}.truncate_prompt_tokens", params.truncate_prompt_tokens, right)
    if params.truncation_side not in (None, *SIDES):
        raise wrong(f"{field}.truncation_side", params.truncation_side, " or ".join(SIDES))
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidRequest(
            f"{field}.allowed_token_ids is empty; name at least one", field=f"{field}.allowed_token_ids"
        )
    if params.detokenize is False and params.stop:
        raise InvalidRequest(
            f"{field}.detokenize is false, so {field}.stop has no text to match", field=f"{field}.detokenize"
        )


def _check_repetition(asked: RepetitionDetection, field: str) -> None:
    longest, shortest, count = asked.max_pattern_size, asked.min_pattern_size, asked.min_count
    if not 0 <= longest <= MAX_PATTERN:
        name, value, right = "max_pattern_size", longest, f"an integer from 1 to {MAX_PATTERN}, or 0 for no detection"
    elif not 0 <= shortest <= longest:
        name, value, right = "min_pattern_size", shortest, f"an integer from 0 to max_pattern_size ({longest})"
    elif longest and not 2 <= count <= MAX_PATTERN_WORK // (longest - max(1, shortest) + 1):
        most = MAX_PATTERN_WORK // (longest - max(1, shortest) + 1)
        name, value, right = "min_count", count, f"an integer from 2 to {most}, for this many pattern sizes"
    else:
        return
    raise wrong(f"{field}.{name}", value, right)


def check_structured(asked: StructuredOutput, field: str) -> None:
    """Raise `InvalidRequest` unless exactly one form is set. The grammar compiler finds out whether it is valid."""
    values = msgspec.structs.asdict(asked)
    given = [name for name in FORMS if values[name] not in (None, False)]
    if len(given) != 1:
        said = f"sets {' and '.join(given)}" if given else "sets nothing"
        raise InvalidRequest(f"{field} {said}; give exactly one of: {', '.join(FORMS)}", field=field)
    if asked.disable_any_whitespace and not given[0].startswith("json"):
        raise InvalidRequest(
            f"{field}.disable_any_whitespace works only with json and json_object; {field} sets {given[0]}",
            field=f"{field}.disable_any_whitespace",
        )
    check_carried(asked.json, f"{field}.json")
    check_carried(asked.structural_tag, f"{field}.structural_tag")
    if asked.choice is not None and not (asked.choice and all(asked.choice)):
        raise InvalidRequest(f"{field}.choice needs at least one text, and no empty text", field=f"{field}.choice")


def _check_outputs(params: SamplingParams, field: str) -> None:
    """Check `n`, `best_of` and `beam_width` against each other and against parameters that beam search excludes."""
    n = params.n or 1
    for name in ("best_of", "beam_width"):
        value = getattr(params, name)
        if value is not None and value < n:
            raise wrong(f"{field}.{name}", value, f"at least n ({n})")
    if params.beam_width is None:
        return
    if params.best_of is not None:
        raise InvalidRequest(
            f"{field}.best_of is {params.best_of} and beam_width is {params.beam_width}; give one of the two",
            field=f"{field}.best_of",
        )
    if params.temperature is not None and not params.greedy:
        raise InvalidRequest(
            f"{field}.temperature is {params.temperature!r}, but beam search (beam_width) does not sample; "
            "leave it out or give 0",
            field=f"{field}.temperature",
        )


def check_token_ids(params: SamplingParams, vocab_size: int, field: str) -> None:
    """Raise `InvalidRequest` for a token id outside the stage's vocabulary, or if no token is left to choose.

    `field`: prefix of the parameter's name, dot included.
    """
    lists = {
        "stop_token_ids": params.stop_token_ids,
        "suppress_tokens": params.suppress_tokens,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
        "logprob_token_ids": params.logprob_token_ids,
    }
    for name, ids in lists.items():
        for token in ids or ():
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{field}{name} has {token}, which is no token id; token ids are from 0 to {vocab_size - 1}",
                    field=f"{field}{name}",
                )
    suppressed = set(params.suppress_tokens or ())
    if params.allowed_token_ids and suppressed.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            f"{field}suppress_tokens has all of allowed_token_ids: no token is left to choose",
            field=f"{field}allowed_token_ids",
        )
    if len(suppressed) == vocab_size:
        raise InvalidRequest(f"{field}suppress_tokens leaves no token to choose", field=f"{field}suppress_tokens")
    if params.min_tokens and len(suppressed.union(params.stop_token_ids or ())) == vocab_size:
        raise InvalidRequest(
            f"{field}stop_token_ids leaves no token to choose until min_tokens ({params.min_tokens})",
            field=f"{field}stop_token_ids",
        )


def sampling_from(values: dict[str, Any], field: str, limits: RequestLimits = DEFAULTS) -> SamplingParams:
    """Read parameters from a JSON object; errors name unknown names, with their nearest neighbour, and wrong types."""
    check_lists(values, limits, f"{field}.")
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
    check_sampling(params, field, limits)
    return params
