"""Answers about given texts: embeddings, pooling, classes, scores and ranks."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from segue.server.operations.answers.chat import Usage


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Pooled(TypedDict):
    index: int
    object: Literal["pooling"]
    data: list[float] | str


class Classified(TypedDict):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Scored(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class OfTexts(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: Usage


class PoolingAnswer(OfTexts):
    data: list[Pooled]


class ClassifyAnswer(OfTexts):
    data: list[Classified]


class ScoreAnswer(OfTexts):
    data: list[Scored]


class Document(TypedDict):
    text: str


class Ranked(TypedDict):
    index: int
    document: NotRequired[Document]
    relevance_score: float


class RerankAnswer(TypedDict):
    id: str
    model: str
    results: list[Ranked]
    usage: Usage
