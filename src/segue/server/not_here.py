"""Endpoints of OpenAI's and Anthropic's APIs that this server does not have, and what is there in their place."""

from __future__ import annotations

_OPENAI = {
    "/v1/responses/compact": "send /v1/responses the items that are to be remembered, or previous_response_id",
    "/v1/conversations": "go on from a kept response with previous_response_id of /v1/responses",
    "/v1/assistants": "send instructions and tools with each request to /v1/responses",
    "/v1/threads": "go on from a kept response with previous_response_id of /v1/responses",
    "/v1/audio/speech": "a model that speaks does so in /v1/chat/completions, with modalities and audio",
    "/v1/realtime": "send recordings to /v1/chat/completions as input_audio, and let the answer stream",
    "/v1/files": "send media within a request, as data: URLs",
    "/v1/uploads": "send media within a request, as data: URLs",
    "/v1/vector_stores": "make vectors of texts with /v1/embeddings, and keep them elsewhere",
    "/v1/batches": "send the requests side by side: what runs together is batched, and priority lets others go first",
    "/v1/images/variations": "send the picture to /v1/images/edits",
    "/v1/fine_tuning": "",
    "/v1/moderations": "a classifier answers /v1/classify",
    "/v1/containers": "",
    "/v1/evals": "",
    "/v1/organization": "",
    "/v1/chatkit": "",
    "/v1/skills": "",
}
_ANTHROPIC = {
    "/v1/messages/batches": "send the messages side by side: what runs together is batched",
    "/v1/complete": "send POST /v1/messages",
}


def known_elsewhere(method: str, path: str) -> str | None:
    """What is to be said of an endpoint, or of one below it, that others have; None where it is none of theirs."""
    for whose, known in (("OpenAI", _OPENAI), ("Anthropic", _ANTHROPIC)):
        for endpoint, instead in known.items():
            if path == endpoint or path.startswith(f"{endpoint}/"):
                said = f"no such endpoint: {method} {path}; {whose} has {endpoint}, this server does not"
                return f"{said}: {instead}" if instead else said
    return None
