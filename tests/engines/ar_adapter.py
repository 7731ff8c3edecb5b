"""An adapter over a tiny causal LM of transformers, and what tests do with an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from segue.engines.autoregressive.contract import Fed, FlatBatch, KVSpec, Prompt, Vocabulary
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageRequest
from segue.kernels.attention.paged_attention import NAME
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK, SamplingParams

VOCAB = 97
HIDDEN = 48
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
}


def tiny_model(kind: str = "qwen2", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Random weights large enough that layers, positions and context decide the next token."""
    cls, config = MODELS[kind]
    shape = {**SHAPE, **({"head_dim": 8} if kind == "qwen3" else {}), **changes}
    model = cls(config(**shape)).eval()
    randomise(model, seed)
    return model


def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                scale = 1.0 if "embed" in name else 2.0 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


class Letters:
    """One character per token, from "A" on."""

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return [chr(ord("A") + token).encode() for token in token_ids]

    def name(self, token_id: int) -> str:
        return ""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("A") for letter in text if letter != " "]


class TinyAdapter:
    """Plain text in, plain text out; letters stand for tokens."""

    conditioned = False

    def __init__(self, model: PreTrainedModel, *, capture: bool = False, max_model_len: int = 256) -> None:
        self.model = model
        config = model.config
        model.set_attn_implementation(NAME)
        heads = config.num_attention_heads
        self.device = torch.device("cpu")
        self.kv = KVSpec(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=torch.float32,
            capture_width=config.hidden_size if capture else 0,
        )
        self.library_decoder = model.model
        self.axes = 1
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len
        self.end_token_ids: frozenset[int] = frozenset()
        self.default_sampling = SamplingParams(temperature=0.0)
        self.vocabulary: Vocabulary | None = Letters()
        self.weight_bytes = 0
        self.forwards: list[int] = []
        self.fail_next = False
        self.poison: int | None = None
        """Any sequence that holds this token gets NaN."""

    def begin(self, request: StageRequest) -> Any:
        return {}

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        return Fed(prompt=payload["prompt"])

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        return self.model.model.embed_tokens(token_ids)

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.forwards.append(len(embeds))
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        if self.poison is not None:
            embeds = torch.where((batch.token_ids == self.poison)[:, None], torch.nan, embeds)
        hidden = self.model.model(
            inputs_embeds=embeds[None],
            position_ids=batch.positions[:1],
            use_cache=False,
            paged=batch.attention,
        ).last_hidden_state[0]
        return hidden, hidden if self.kv.capture_width else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(hidden).float()

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


class ConditionedAdapter(TinyAdapter):
    """A tiny talker: the input of generated token k is its embedding plus row k from upstream."""

    conditioned = True

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        return Fed(payload.get("prompt"), payload.get("rows"), payload.get("tail"))

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        embeds = self.model.model.embed_tokens(token_ids)
        return embeds if conditioning is None else embeds + conditioning


def stage_request(request_id: str, *, seed: int = 0, **fields: Any) -> StageRequest:
    """A request with the library's sampling defaults under what is given as `sampling`."""
    sampling = fields.pop("sampling", SamplingParams(temperature=0.0))
    request = fields.pop("request", None) or Request(request_id=request_id)
    values: dict[str, Any] = {
        "upstreams": frozenset({"input"}),
        "downstreams": frozenset(),
        "to_client": frozenset(),
        **fields,
    }
    return StageRequest(request_id, "main", request, sampling.over(FALLBACK), seed, **values)


@dataclass
class Result:
    """All outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def last(self) -> TokenOutput:
        return self.outputs[-1]

    def rows(self) -> torch.Tensor:
        """All captured rows; they must come in order and without gaps."""
        pieces, start = [], 0
        for output in self.outputs:
            if output.captured is not None:
                assert output.captured.start == start
                start += len(output.captured.data)
                pieces.append(output.captured.data)
        return torch.cat(pieces)


def branch(request_id: str, index: int) -> str:
    """Where a `Driver` gathers an output of a request."""
    return f"{request_id}[{index}]" if index else request_id


class Driver:
    """Steps an engine and gathers what comes out, with an audit after every step."""

    def __init__(self, engine: AutoregressiveEngine) -> None:
        self.engine = engine
        self.results: dict[str, Result] = {}

    def add(self, request: StageRequest, prompt: Prompt | Sequence[int], **rows: torch.Tensor) -> None:
        if not isinstance(prompt, Prompt):
            prompt = Prompt(list(prompt))
        self.engine.add(request)
        self.engine.feed(request.request_id, "input", {"prompt": prompt, **rows}, final=True)

    def step(self) -> list[TokenOutput]:
        outputs = self.engine.step()
        self.engine.audit()
        for output in outputs:
            result = self.results.setdefault(branch(output.request_id, output.index), Result())
            assert not output.token_ids or output.first_index == len(result.token_ids)
            result.token_ids += output.token_ids
            result.text += output.text
            result.outputs.append(output)
        return outputs

    def run(self, steps: int = 2000) -> dict[str, Result]:
        for _ in range(steps):
            if not self.engine.has_work():
                return self.results
            self.step()
        raise AssertionError(f"still at work after {steps} steps: {self.engine.stats()}")


def prompts(count: int, lengths: Iterable[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        for length, _ in zip(lengths, range(count), strict=False)
    ]


def logprobs_of(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """The library's log-probabilities [n] of the tokens of a continuation."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    finally:
        model.set_attn_implementation(NAME)
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def generate(model: PreTrainedModel, prompt: Sequence[int], tokens: int, **options: Any) -> list[int]:
    """The library's own answer, greedy."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            **options,
        )
    finally:
        model.set_attn_implementation(NAME)
    return out[0, len(prompt) :].tolist()
