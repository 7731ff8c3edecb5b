"""The bodies of `/v1/score` and `/v1/rerank`, as vLLM (and Jina and Cohere) have them, into checked pairs of texts."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, shown, wrong
from segue.messages.request import Request
from segue.orchestrator.service import ModelCard
from segue.server.errors import Unsupported
from segue.server.parameters import check_model, parse_body, turn_fields, with_model
from segue.server.settings import ServerSettings
from segue.server.text_requests import cut_options

MAX_PAIRS = 2048
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that vLLM takes for the two sides of a score."""


class ScoringBody(msgspec.Struct, kw_only=True):
    """What both have. null means not given."""

    model: str
    use_activation: bool | None = None
    """Of a cross-encoder: false gives its bare logits."""
    truncate_prompt_tokens: int | None = None
    """Of a text, and of a pair where a model reads both together."""
    truncation_side: str | None = None
    user: str | None = None
    """The tenant, for fair scheduling."""
    priority: int | None = None
    deadline: float | None = None
    """Seconds from now."""


class ScoreBody(ScoringBody, kw_only=True):
    """Two sides: one text with each of the other's, or texts in pairs."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class Document(msgspec.Struct, kw_only=True):
    """A document as an object."""

    text: str


class RerankBody(ScoringBody, kw_only=True):
    """A query and documents."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    """So many of the best; 0, and null: all."""
    return_documents: bool | None = None
    """Jina's; true by default."""


_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "mm_processor_kwargs": ({},),
    "add_special_tokens": (True,),
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "rank_fields": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
"""vLLM's, Cohere's and Jina's that cannot be honoured → the values that ask for nothing (null always does)."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Checked: pair i is `firsts[i]` (`firsts[0]` where there is one) with `seconds[i]`."""

    model: str
    firsts: list[str]
    seconds: list[str]
    fields: tuple[str, str]
    """What the client calls the two sides."""
    crossed: bool
    """The model reads both texts of a pair together; else each becomes a vector."""
    options: dict[str, Any]
    turn: dict[str, Any]

    def singly(self, texts: list[str]) -> list[Request]:
        """A vector of each."""
        return [_request(text, ["embedding"], self.options, self.turn) for text in texts]

    def paired(self) -> list[Request]:
        """A score of each pair."""
        firsts = self.firsts * len(self.seconds) if len(self.firsts) == 1 else self.firsts
        return [
            _request(first, ["score"], {**self.options, "text_pair": second}, self.turn)
            for first, second in zip(firsts, self.seconds, strict=True)
        ]


def _request(text: str, modalities: list[str], options: dict[str, Any], turn: dict[str, Any]) -> Request:
    request_id = f"score-{uuid.uuid4().hex}"
    return Request(request_id=request_id, prompt=text, modalities=modalities, options=options, **turn)


def score_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> Scoring:
    """Raises `InvalidRequest` naming the parameter, its value and what would be right."""
    body = parse_body(with_model(values, card, settings), ScoreBody, _UNSUPPORTED, {})
    read = msgspec.structs.asdict(body)
    given = tuple(name for name in dict.fromkeys(sum(_SIDES, ())) if read[name] is not None)
    if given not in _SIDES:
        right = "; or ".join(" and ".join(side) for side in _SIDES)
        has = f"given: {' and '.join(given)}" if given else "no texts are given"
        raise InvalidRequest(f"{has}; give {right}", field=given[-1] if given else "text_1")
    first, second = given
    firsts, seconds = _texts(read[first], first), _texts(read[second], second)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"{first} has {len(firsts)} texts and {second} {len(seconds)}; {first} must have one, or as many",
            field=first,
        )
    return _scoring(body, firsts, seconds, (first, second), card, settings)


def rerank_request(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> tuple[Scoring, RerankBody]:
    """Raises `InvalidRequest` naming the parameter, its value and what would be right."""
    body = parse_body(with_model(values, card, settings), RerankBody, _UNSUPPORTED, {})
    if body.top_n is not None and body.top_n < 0:
        raise wrong("top_n", body.top_n, "at least 1, or 0 for all")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    checked = _texts(documents, "documents")
    return _scoring(body, [body.query], checked, ("query", "documents"), card, settings), body


def _texts(given: str | list[str], field: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise InvalidRequest(f"{field} is empty; give at least one text", field=field)
    if len(texts) > MAX_PAIRS:
        raise InvalidRequest(f"{field} has {len(texts)} entries; there may be {MAX_PAIRS}", field=field)
    return texts


def _scoring(
    body: ScoringBody,
    firsts: list[str],
    seconds: list[str],
    fields: tuple[str, str],
    card: ModelCard,
    settings: ServerSettings,
) -> Scoring:
    check_model(body.model, card, settings)
    if card.gives.isdisjoint(("embedding", "score")):
        raise Unsupported(
            f"model {shown(body.model)} gives neither scores nor embeddings (it gives "
            f"{', '.join(sorted(card.gives))}); texts are compared by a model of embeddings or a cross-encoder",
            field="model",
        )
    crossed = "score" in card.gives
    if body.use_activation is False and not crossed:
        raise Unsupported(
            "use_activation is False; a model of embeddings has no activation, its score is a cosine: leave it out",
            field="use_activation",
        )
    return Scoring(
        model=body.model,
        firsts=firsts,
        seconds=seconds,
        fields=fields,
        crossed=crossed,
        options={
            **({"use_activation": body.use_activation} if crossed and body.use_activation is not None else {}),
            **cut_options(body, card),
        },
        turn=turn_fields(body.priority, body.user, body.deadline, time.time()),
    )
