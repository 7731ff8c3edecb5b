"""Parameters of vLLM's clients beyond OpenAI's, and which of them are unsupported."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request

from segue.messages.errors import InvalidRequest, wrong

VLLM_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "watermarking": (False,),
    "stream_interval": (1,),
    "return_token_offsets": (False,),
    "guided_decoding_backend": ("auto", "xgrammar"),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "routed_experts_prompt_start": (0,),
    "mm_payload": ("tensors", "none"),
    "return_mm_kwargs": (True, False),
}
"""Unsupported parameters of vLLM's → values that have no effect."""
OF_TEXTS: dict[str, tuple[object, ...]] = {
    "messages": (),
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
"""The same for endpoints that return vectors, classes or scores."""
OF_STRUCTURED_OUTPUTS: dict[str, tuple[object, ...]] = {
    "disable_fallback": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "_backend": (),
    "_backend_was_auto": (False,),
}
"""The same within `structured_outputs`: clients that send vLLM's own object send all of its fields."""
NOTHING_OF_ANSWER: dict[str, None] = dict.fromkeys(
    ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
)
"""Keys of vLLM's whole answers that are always null here."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""The form of a request's id: nothing that would break a log line or a header."""
MAX_SALT = 1024
"""Most characters of `cache_salt`; vLLM's limit."""


def with_headers(values: dict[str, Any], http: Request) -> dict[str, Any]:
    """Return the body with what headers say: the id of `X-Request-Id` if it has none itself, as in vLLM, and
    `return_metrics` if `X-Return-Metrics` is set."""
    found: dict[str, Any] = {}
    given = http.headers.get("x-request-id", "")
    if values.get("request_id") is None and REQUEST_ID.fullmatch(given):
        found["request_id"] = given
    if http.headers.get("x-return-metrics", "").lower() in ("1", "true") and not values.get("return_metrics"):
        found["return_metrics"] = True
    return {**values, **found}


def checked_id(given: str | None) -> str | None:
    """Check `request_id`, which becomes part of the answer's id. Raises `InvalidRequest`."""
    if given is not None and not REQUEST_ID.fullmatch(given):
        raise wrong("request_id", given, "1 to 128 visible ASCII characters")
    return given


def checked_salt(given: str | None) -> str | None:
    """Check `cache_salt`. Raises `InvalidRequest`."""
    if given is not None and not 0 < len(given) <= MAX_SALT:
        raise InvalidRequest(
            f"cache_salt has {len(given)} characters; it must have 1 to {MAX_SALT}", field="cache_salt"
        )
    return given
