"""Converts the body of `/v1/completions` (OpenAI's, with vLLM's extensions) into checked `Request`s."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import Any

from segue.graph.parts import TOKENS
from segue.messages.errors import InvalidRequest
from segue.messages.limits import check_count
from segue.messages.request import MULTI_MODAL_DATA, Request
from segue.orchestrator.service import ModelCard
from segue.orchestrator.tokenless import refusal
from segue.server.generation.parameters import (
    Answering,
    CommonBody,
    StreamOptions,
    answering_fields,
    check_model,
    check_without_tokenizer,
    common_fields,
    new_id,
    parse_body,
    with_model,
)
from segue.server.generation.sampling import choices_of, sampling_of, seeds_of, together
from segue.server.generation.text_requests import texts_of
from segue.server.http.errors import not_for_this_model
from segue.server.openai.chat.request import MultiModalData, multi_modal_messages
from segue.server.settings import ServerSettings
from segue.server.vllm.parameters import VLLM_UNSUPPORTED

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionBody(CommonBody, kw_only=True):
    """Every parameter that has an effect. null means not given."""

    prompt: str | list[str | int | list[int]] | None = None
    """A text, token ids, or a list of either."""
    prompt_embeds: str | list[str] | None = None
    """vLLM's, instead of a prompt: base64 of a file with a tensor, or a list of these."""
    multi_modal_data: MultiModalData = None
    """Media for the placeholders of the prompt: kind → a URL, or a list of URLs."""
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


_UNSUPPORTED: dict[str, tuple[object, ...]] = {"suffix": ("",), **VLLM_UNSUPPORTED}


@dataclass(frozen=True)
class Slot:
    """Where the outputs of one request go: choices `first`, `first + 1`, …, of prompt number `prompt`."""

    prompt: int
    first: int


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Answering):
    """A checked request: a `Request` for each prompt (or for each choice, if the model makes one at a time)."""

    requests: list[Request]
    slots: list[Slot]
    """Parallel to `requests`."""
    named: list[dict[str, str]]
    """Parallel to `requests`: the prompt's field in a `Request` → the client's field."""
    prompts: list[str | list[int] | bytes]
    choices_each: int
    """Choices per prompt; choice `i` of prompt `p` has index `p * choices_each + i`."""
    echo: bool
    generates: bool
    """False: only the prompt was requested (`max_tokens` 0); the one generated token is not shown."""
    logprobs: int | None


def completion_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> CompletionRequest:
    """Check everything that needs no stage. Raises `InvalidRequest`."""
    body = parse_body(
        with_model(values, card, settings), CompletionBody, _UNSUPPORTED, {"stream_options": StreamOptions}
    )
    check_model(body.model, card, settings)
    if card.text_stage is None or "text" not in card.gives:
        raise not_for_this_model("makes no text")
    now = time.time()
    common = common_fields(body, card, now)
    prompts = _given(body)
    media = multi_modal_messages(body.multi_modal_data, card, settings)
    if media and (len(prompts) > 1 or body.prompt is None):
        right = f"prompt has {len(prompts)} prompts; send one" if body.prompt else "prompt_embeds have no place for it"
        raise InvalidRequest(f"{MULTI_MODAL_DATA} is given, but {right}", field=MULTI_MODAL_DATA)
    # reported tokens are in the log-probabilities
    logprobs = 0 if body.logprobs is None and body.logprob_token_ids else body.logprobs
    echo = bool(body.echo)
    if echo and body.prompt_embeds is not None:
        raise InvalidRequest("echo is true, but prompt_embeds has no text; leave one out", field="echo")
    if echo and body.truncate_prompt_tokens is not None:
        raise InvalidRequest("echo is true, but truncate_prompt_tokens cuts the prompt; give one", field="echo")
    check_without_tokenizer(body, card, text=True, logprobs=logprobs is not None)
    if echo and not card.tokenizer:
        raise refusal("echo", "is true", "leave it out")
    of_prompt = logprobs if echo and body.prompt_logprobs is None else body.prompt_logprobs
    named = {} if body.prompt_logprobs is not None else {"prompt_logprobs": "logprobs"}
    sampling = sampling_of(
        body,
        card,
        named,
        max_tokens=_max_tokens(body),
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
    )
    each = choices_of(body, together=card.several_texts)
    check_count("prompt", len(prompts) * each, card.limits, "max_choices", f"answers ({len(prompts)} prompts × n)")
    as_one = each > 1 and card.several_texts
    if as_one:
        sampling = together(sampling, each, card)
    seeds = seeds_of(body, 1 if as_one else each)
    answering = answering_fields(body, card, "cmpl", now, named)
    request_id = new_id("cmpl")
    slots = [Slot(prompt, first) for prompt in range(len(prompts)) for first in range(len(seeds))]
    requests = []
    for number, slot in enumerate(slots):
        prompt = prompts[slot.prompt]
        # the text is known here only if it was sent as text, and the text of its first token never is
        seen = echo and (not isinstance(prompt, str) or logprobs is not None)
        requests.append(
            Request(
                request_id=request_id if len(slots) == 1 else f"{request_id}-{number}",
                messages=media,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=prompt if isinstance(prompt, list) else None,
                prompt_embeds=prompt if isinstance(prompt, bytes) else None,
                add_special_tokens=body.add_special_tokens,
                modalities=["text", TOKENS] if seen else ["text"],
                sampling=sampling,
                seed=seeds[slot.first],
                return_prompt_ids=answering["return_token_ids"] or answering["continuous_usage"],
                **common,
            )
        )
    return CompletionRequest(
        **answering,
        requests=requests,
        slots=slots,
        named=[_place(prompts, slot.prompt, "prompt_embeds" if body.prompt is None else "prompt") for slot in slots],
        prompts=prompts,
        choices_each=each,
        echo=echo,
        generates=body.max_tokens != 0,
        logprobs=logprobs,
    )


def _max_tokens(body: CompletionBody) -> int:
    if body.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0; it must be at least 1, unless echo is true", field="max_tokens")
    return body.max_tokens or 1


def _given(body: CompletionBody) -> list[str | list[int] | bytes]:
    """A list with one entry per prompt; bytes are embeddings."""
    if body.prompt is not None:
        if body.prompt_embeds is not None:
            raise InvalidRequest("prompt and prompt_embeds are given; give one", field="prompt_embeds")
        prompts = texts_of(body.prompt, "prompt")
        for number, prompt in enumerate(prompts):
            if not prompt:
                at = "prompt" if isinstance(body.prompt, str) else f"prompt[{number}]"
                raise InvalidRequest(f"{at} is empty; give at least one character", field=at)
        return [*prompts]
    if body.prompt_embeds is None:
        raise InvalidRequest("prompt is missing", field="prompt")
    files = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    if not files:
        raise InvalidRequest("prompt_embeds is empty; give at least one", field="prompt_embeds")
    return [_decoded(file, f"prompt_embeds[{index}]") for index, file in enumerate(files)]


def _decoded(file: str, field: str) -> bytes:
    try:
        return base64.b64decode(file, validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not base64: {error}", field=field) from error


def _place(prompts: list[str | list[int] | bytes], number: int, name: str) -> dict[str, str]:
    """Field of one prompt in a `Request` → its path in the body, under `name`. A stage after the tokenizer cannot tell
    the source of its ids, and says messages."""
    place = name if len(prompts) == 1 else f"{name}[{number}]"
    return dict.fromkeys(("prompt", "prompt_token_ids", "prompt_embeds", "messages"), place)
