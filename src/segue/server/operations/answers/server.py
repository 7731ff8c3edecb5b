"""Answers about the server, its models, their examples and its tokenizer."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from segue.orchestrator.service import StageHealth


class Tokens(TypedDict):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class TensorInput(TypedDict):
    dtype: str
    shape: list[int | None]
    tokens: int
    most: int


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    family: str
    takes: list[str]
    gives: list[str]
    tensors: dict[str, TensorInput]
    stages: list[str]
    sampling_stages: list[str]
    voices: list[str]
    options: list[str]
    max_model_len: int | None


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Example(TypedDict):
    title: str
    messages: NotRequired[list[dict[str, Any]]]
    prompt: NotRequired[str]
    image: NotRequired[str]
    size: NotRequired[str]
    steps: NotRequired[int]
    answer: NotRequired[str]


class Examples(TypedDict):
    object: Literal["list"]
    data: list[Example]


class Voices(TypedDict):
    voices: list[str]
    default: str | None
    formats: list[str]


class HealthAnswer(TypedDict):
    model: str
    ready: bool
    stages: dict[str, StageHealth]


class MovedWorker(TypedDict):
    from_stage: str
    to_stage: str
    worker: str
    seconds: float


class Version(TypedDict):
    version: str
