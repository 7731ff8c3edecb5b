"""Check the size of prompt embeddings when a request is admitted.

Optional reading: only for prompts of embeddings.
"""

from __future__ import annotations

from segue.media.arrays import EMBEDS, called
from segue.messages.errors import InvalidRequest, TooLarge
from segue.messages.request import Request


def check_embeds_bytes(request: Request, most: int) -> None:
    """Raise `InvalidRequest` for prompt embeddings if the deployment accepts none (`most` 0), or `TooLarge` for more
    than `most` bytes."""
    files = {part.field: part.embeds for part in request.embedded() if part.embeds is not None}
    if request.prompt_embeds is not None:
        files[EMBEDS] = request.prompt_embeds
    if not files:
        return
    field, size = next(iter(files)), sum(map(len, files.values()))
    what = called(field)
    if not most:
        raise InvalidRequest(
            f"{what} is given; this deployment accepts none: see limits.max_prompt_embeds_bytes", field=field
        )
    if size > most:
        raise TooLarge(
            f"{what} has {size} bytes{_shared(len(files))}; at most {most} are taken (limits.max_prompt_embeds_bytes)",
            field=field,
        )


def _shared(files: int) -> str:
    return f" with {files - 1} more" if files > 1 else ""
