"""The interface between the autoregressive engine and a model. Each family writes a stage model per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from segue.engines.autoregressive.sample.codes import draw_heads
from segue.engines.contract import LoadContext, Payload, StageRequest
from segue.kernels.attention.interface import AttentionWindow, Chunked
from segue.kernels.kv.layout import KVLayout, LayerShape, lay_out
from segue.kernels.kv.states import StateLayout, StateStep
from segue.kernels.linear.lora import Lora
from segue.kernels.operations import draw_codes
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams
from segue.parallel.group import Group


@dataclass(slots=True)
class KVSpec:
    """Shape of the KV cache of a decoder."""

    layers: int
    kv_heads: int
    head_dim: int
    """Width of the keys, and of the values if `value_dim` is None."""
    dtype: torch.dtype
    capture_width: int = 0
    """Width of the captured row per token (0: nothing is captured). Rows are stored per block, next to K and V, so that
    a prefix-cache hit can supply the rows that it did not compute."""
    capture_dtype: torch.dtype = torch.float32
    value_dim: int | None = None
    windows: tuple[AttentionWindow, ...] = ()
    """[layers] Attention window of each layer (`sliding_window` of `transformers`, or chunks). Blocks that no later
    token sees are freed. Empty: full attention in every layer."""
    shapes: tuple[LayerShape, ...] = ()
    """[layers] Shape of each layer if they differ; `kv_heads`, `head_dim` and `value_dim` are then ignored."""
    stored: torch.dtype | None = None
    """Storage dtype of keys and values; None: `dtype`, in which they are computed."""
    bidirectional: frozenset[int] = frozenset()
    """Layers in which prompt tokens may attend to each other in both directions (`Prompt.bidirectional`)."""
    coarse: bool = False
    """The decoder rounds to 8 or 16 bits internally, whatever `dtype` says."""
    states: StateLayout | None = None
    """Recurrent state that the decoder keeps per sequence besides keys and values; None: no state."""
    cross_attends: bool = False
    """Some layers cross-attend to `Prompt.cross_inputs`; they store nothing in this cache."""
    gathered: bool = False
    """Its layers run their own attention over gathered keys and values; its steps are not captured in graphs."""

    @property
    def stored_size(self) -> int:
        """Bytes per stored element."""
        return (self.stored or self.dtype).itemsize

    def layout(self, max_model_len: int) -> KVLayout:
        """Group the layers. Raises `ConfigError` if `windows` or `shapes` do not have one entry per layer.

        A window or chunk of at least `max_model_len` counts as full attention. Captured rows live with the blocks of
        group 0 and are needed for whole prompts: a capturing decoder without a full-attention layer keeps all blocks.
        """
        for name, given in (("windows", self.windows), ("shapes", self.shapes)):
            if given and len(given) != self.layers:
                raise ConfigError(f"the KV spec has {len(given)} {name} for {self.layers} layers", field=name)
        shape = LayerShape(self.kv_heads, self.head_dim, self.value_dim or self.head_dim)
        windows = [None if _reaches(back, max_model_len) else back for back in self.windows]
        if not windows or (self.capture_width and None not in windows):
            if any(isinstance(back, Chunked) for back in windows):  # attention receives windows, but not chunks
                raise ConfigError("a decoder with chunked attention that captures rows needs a full-attention layer")
            windows = [None] * self.layers
        return lay_out(self.shapes or [shape] * self.layers, windows, self.bidirectional)


def _reaches(back: AttentionWindow, length: int) -> bool:
    """Whether every token of a sequence of this length sees all tokens before it."""
    return back is None or (back.size if isinstance(back, Chunked) else back) >= length


class TokenRule(Protocol):
    """A token constraint of the family's own `generate`, applied in addition to the sampling parameters."""

    @property
    def remembers(self) -> bool:
        """Whether the forbidden tokens depend on which tokens came before, not only on their number."""

    def saw(self, token: int) -> None:
        """Record one more generated token."""

    def copy(self) -> TokenRule:
        """Return an independent copy in the same state."""

    def apply(self, logits: torch.Tensor, generated: int) -> None:
        """Set forbidden tokens to -inf in place. `logits`: [vocab] float32, after all other changes to them;
        `generated`: the number of tokens generated so far."""


@dataclass(slots=True)
class Prompt:
    """The input that a request is prefilled with."""

    token_ids: list[int]
    """[T] ids, placeholders included: for penalties, for hashing, and for embedding where `embeds` is None."""
    embeds: torch.Tensor | None = None
    """[T, hidden]: used instead of embedding `token_ids`. Preferably on the host, because it lives as long as the
    request: a step copies the rows it computes to the device, whose memory belongs to keys and values."""
    looked_up: Sequence[tuple[int, int]] = ()
    """Ranges [start, stop) of tokens, in order, that are embedded by their ids even if `embeds` is set; the rows of
    `embeds` for them are ignored."""
    positions: torch.Tensor | None = None
    """[axes, T] long, rotary positions (axes 3 for M-RoPE, 1 otherwise); None: 0..T-1 on every axis."""
    position_delta: int = 0
    """Position of generated token i is T + i + position_delta."""
    identity: Sequence[int | bytes] | None = None
    """[T] the identity of each token for prefix caching, if ids do not determine it (media content, upstream rows);
    None: the ids. An empty sequence forbids sharing the prompt."""
    bidirectional: Sequence[tuple[int, int]] = ()
    """Ranges [start, stop) of tokens, in order, that attend to each other in both directions, in the layers of
    `KVSpec.bidirectional`. All other tokens, and these in other layers, attend causally. The `identity` of each token
    of a span must identify the whole span."""
    modality_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens per modality, for usage."""
    adapter: object | None = None
    """Weight changes for this sequence's tokens (LoRA), passed to the family's forward; `identity` must cover it. A
    step that contains such a sequence is not replayed from a captured graph."""
    cross_inputs: object | None = None
    """Cross-attention inputs that are not tokens (images), passed to the family's forward; `identity` must cover them.
    A step that contains such a sequence is not replayed from a captured graph."""
    rule: TokenRule | None = None
    """The family's token constraint on replies to this prompt; each output gets its own copy."""
    reply: Sequence[int] = ()
    """The ids of the whole reply, its end token included, if it is given: they are computed like the prompt and emitted
    like tokens of an earlier attempt, and nothing is sampled. Empty: the reply is sampled."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Data for the family's own forward and transfers; the stage model slices per-token tensors [T, …]."""


class Then(Enum):
    """What a sequence does after a piece of its input (`hold`)."""

    END = "end"
    """It draws until its output ends. No further piece comes."""
    TURN = "turn"
    """It draws until its output ends, and then holds for the next piece."""
    HOLD = "hold"
    """It draws nothing and holds for the next piece."""
    LEND = "lend"
    """It draws nothing, and lends its blocks to another engine until it is cancelled (`contexts`). No further piece
    comes."""


@dataclass(slots=True)
class Fed:
    """The result of feeding one chunk from upstream."""

    prompt: Prompt | None = None
    """A complete piece of the input. Most requests have one. A later piece follows all that was computed and generated
    before it; its `positions` count from there, and its ranges from its own first token."""
    conditioning: torch.Tensor | None = None
    """[n, width]: rows for the next generated tokens: over all chunks, row k belongs to generated token k."""
    tail: torch.Tensor | None = None
    """[width]: the row for every token after the last conditioning row; set when the stream has ended."""
    nothing: bool = False
    """The stream ended with nothing to generate: the request finishes (`stop`) without a token."""
    then: Then = Then.END
    """With a `prompt`: what follows it."""
    closed: bool = False
    """Without a `prompt`: no further piece comes. A sequence that holds goes on with `Then.END`."""


@dataclass(slots=True)
class FlatBatch:
    """All tokens of a step, concatenated request by request."""

    token_ids: torch.Tensor
    """[tokens] long."""
    embeds: torch.Tensor | None
    """[tokens, hidden] if any request has its own embeddings (`model.embed` embeds the rows of the others)."""
    positions: torch.Tensor
    """[axes, tokens] long."""
    attention: Any
    """Passed to the decoder's forward as the keyword argument `paged`; reaches the registered attention function.
    None in the check at load, which runs one sequence with the library's own masks."""
    prompts: list[tuple[Prompt | None, int, int]] = field(default_factory=list)
    """Per request, and per piece of its input: the piece, and the range [start, stop) of its tokens and of those
    generated after it that is in this batch, counted from its first token."""
    states: StateStep | None = None
    """The states of its sequences, for decoders with state (`KVSpec.states`); None if `attention` is None."""
    places: list[int] = field(default_factory=list)
    """Per entry of `prompts`: the place in its sequence of the first of its tokens in this batch."""


class Vocabulary(Protocol):
    """Maps a stage's tokens to text and back."""

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; concatenated, they form the text. Empty for tokens without text."""

    def name(self, token_id: int) -> str:
        """Name of a token without bytes, e.g. `<|im_end|>`; may be empty."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""


class LoraHost(Protocol):
    """Keeps the LoRA adapters of a stage. A sequence keeps the adapter that it started with."""

    @property
    def loaded(self) -> Mapping[str, Lora]:
        """Adapters that requests can name. Ranks that load and unload the same adapters in the same order give them the
        same identities."""

    def load(self, name: str, directory: str) -> None:
        """Make it available to requests. Raises `ConfigError` if it cannot be loaded or the name is taken."""

    def unload(self, name: str) -> None:
        """Refuse further requests that name it; unknown names are ignored."""


@runtime_checkable
class Recordable(Protocol):
    """A stage model whose `recordable` says that `forward` only runs a network over the rows, ids and positions of a
    batch. On a CPU, decode steps are then replayed from a captured graph (`decode_graphs`)."""

    recordable: bool


@runtime_checkable
class EmbedsInPlace(Protocol):
    """A stage model whose decoder inputs depend on a token's place in its sequence, or on tensors of its prompt
    (`Prompt.extras`), besides its id. Prompts then have no `embeds`, and `deterministic` is refused."""

    def embed_batch(self, batch: FlatBatch) -> torch.Tensor:
        """[tokens, hidden] decoder inputs of a batch, in place of `embed`: of its `token_ids`, `prompts` and `places`.
        A prompt that is None is a dummy of the load check and the warm-up: of a sequence without tensors."""


def embedded(model: AutoregressiveModel, batch: FlatBatch) -> torch.Tensor:
    """[tokens, hidden] decoder inputs of a batch of plain ids."""
    return model.embed_batch(batch) if isinstance(model, EmbedsInPlace) else model.embed(batch.token_ids, None)


@dataclass(slots=True)
class Draws:
    """The random numbers of a step for codes 1 to `groups - 1` of its rows; n sequences draw. The numbers depend only
    on the request's seed, the token's place in the output and the group, so a rerun draws the same codes."""

    numbers: torch.Tensor
    """[n, groups - 1] float64 in [0, 1): column j is for code j + 1."""
    greedy: torch.Tensor
    """[n] bool: the request is greedy."""
    filters: torch.Tensor
    """[n, 3] float64: temperature (0: greedy), top-k (0: all) and top-p of each request."""
    finite: torch.Tensor | None = None
    """[n] bool: no logits of the row had NaN or +inf so far; None: nothing was drawn."""
    recent: torch.Tensor | None = None
    """[n, looks_back, groups] long: the rows before each of these, the newest last; -1 where the output has none. Only
    for `DrawsByHead`."""

    def code(
        self, group: int, logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
    ) -> torch.Tensor:
        """[n, vocab] → [n] long, code `group` (from 1) of each row: by its number, or the most likely if it is greedy.
        Waits for nothing on the host. A request with NaN fails alone."""
        number = self.numbers[:, group - 1]
        codes, finite = draw_codes(logits, number, self.greedy, temperature=temperature, top_k=top_k, top_p=top_p)
        self._saw(finite)
        return codes

    def codes(
        self,
        groups: Sequence[int],
        logits: torch.Tensor,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> torch.Tensor:
        """[n, k, vocab] → [n, k] long: as `code`, of k groups at once that do not depend on each other."""
        count, k, vocab = logits.shape
        numbers = torch.stack([self.numbers[:, group - 1] for group in groups], dim=1)
        greedy = self.greedy[:, None].expand(count, k)
        codes, finite = draw_codes(
            logits.reshape(-1, vocab),
            numbers.reshape(-1),
            greedy.reshape(-1),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        self._saw(finite.reshape(count, k).all(dim=-1))
        return codes.reshape(count, k)

    def noise(self) -> torch.Tensor:
        """[n, groups - 1] float64, for rows of numbers: Gaussian, of the request's temperature as its variance; zero if
        it is greedy."""
        return torch.special.ndtri(self.numbers.clamp(min=2.0**-54)) * self.filters[:, :1].sqrt()

    def codes_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """[n, groups - 1] float32 → long, the codes that stand for these numbers (`numbers_of`). A request with NaN or
        an infinite number fails alone."""
        self._saw(torch.isfinite(numbers).all(dim=-1))
        return numbers.contiguous().view(torch.int32).long()

    def heads(self, logits: torch.Tensor, first: int, filters: torch.Tensor | None = None) -> torch.Tensor:
        """[n, heads, vocab] → [n, heads] long: one code per head by the numbers from `first` on, or the most likely if
        the request is greedy. `filters`: in place of the request's own."""
        filters = self.filters if filters is None else filters
        count = logits.shape[1]
        codes, finite = draw_heads(logits, self.numbers[:, first : first + count], self.greedy, filters)
        self._saw(finite)
        return codes

    def _saw(self, finite: torch.Tensor) -> None:
        """Note which rows [n] bool had finite logits."""
        self.finite = finite if self.finite is None else self.finite & finite


def numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """Codes that stand for numbers (`Draws.codes_of`), of any shape → these numbers, float32, equal in every bit."""
    return codes.to(torch.int32).view(torch.float32)


@runtime_checkable
class YieldsRows(Protocol):
    """A stage model whose steps yield rows of codes instead of single ids.

    Code 0 of a row is the token: drawn from `logits` under the request's sampling parameters, which end tokens and
    penalties refer to. `advance` gives the other codes. The input of the next step is `embed` of the whole row. Outputs
    carry the rows (`TokenOutput.codes`), and an end token's row has codes, too, which mean nothing. `EndsByRow` ends
    outputs by whole rows. Neither beams nor speculation are supported.

    A model of continuous latents yields rows of numbers: the codes after code 0 are the bits of float32 numbers
    (`Draws.codes_of`), which the journal, prefix caching and later attempts thus carry exactly. Code 0 is its decision
    to stop or to go on, drawn from logits that its stop score gives.
    """

    groups: int
    """Codes per row, code 0 included."""

    def advance(self, hidden: torch.Tensor, ids: torch.Tensor, draws: Draws) -> torch.Tensor:
        """[n, hidden] final hidden states that gave code 0, [n] codes 0 → [n, groups - 1] long, the other codes.

        Called once per step, for all sequences that draw. Rows must not depend on each other, and nothing but the
        arguments may decide: calls are replayed from captured graphs, on a CPU if the stage model is `Recordable`.
        """


@runtime_checkable
class DrawsByHead(Protocol):
    """A stage model that yields rows of codes (`YieldsRows`) with a head per code, which draw independently of each
    other, and depend on rows before (delayed codebooks, repetition rules).

    Its `advance` returns whole rows [n, groups]: it may replace code 0.
    """

    looks_back: int
    """The number of rows before its own that a row depends on (`Draws.recent`)."""
    draws_per_row: int
    """Random numbers that `advance` uses per row: the width of `Draws.numbers`."""


@runtime_checkable
class SpeaksAtTimes(Protocol):
    """A stage model that yields rows of codes, of which many have no codes besides code 0: text beside speech."""

    silent: torch.Tensor
    """[groups - 1] long: the codes of a row that has none."""

    def speaks(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] codes 0 → [n] bool: which rows have codes. `advance` is called for these only; for all, where its calls
        are replayed on a GPU, since a choice would wait for the device."""


@runtime_checkable
class EndsByRow(Protocol):
    """A stage model that yields rows of codes, and whose outputs end by a whole row, in addition to `end_token_ids`."""

    def ends(self, row: Sequence[int]) -> bool:
        """Whether an output ends with this row, its code 0 first. Not asked before `min_tokens`, nor with
        `ignore_eos`."""


def row_identity(codes: Sequence[int]) -> bytes:
    """Identity of a generated row of codes, for `Prompt.identity` of a prompt that contains it."""
    return b"codes" + np.array(codes, dtype="<i4").tobytes()


@runtime_checkable
class TakesLora(Protocol):
    """A stage model that supports LoRA adapters."""

    @property
    def lora(self) -> LoraHost | None:
        """None if the deployment gives the stage no adapters."""


class AutoregressiveModel(Protocol):
    """A decoder as the engine sees it. All tensors on `device`."""

    device: torch.device
    kv: KVSpec
    axes: int
    """Rotary axes: 3 for M-RoPE, else 1."""
    vocab_size: int
    max_model_len: int
    weight_bytes: int
    """Bytes of the loaded weights in memory."""
    conditioned: bool
    """Each generated token's input needs a row from upstream; a request whose next row is missing is not scheduled."""
    end_token_ids: frozenset[int]
    default_sampling: SamplingParams
    """Defaults of the family's own `generate` for this stage."""
    vocabulary: Vocabulary | None
    """None if the stage makes no text or has no tokenizer."""

    def begin(self, request: StageRequest) -> Any:
        """Create the state of a request, which is passed to `feed`. Raises `InvalidRequest`."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """Take one chunk from upstream. Raises `InvalidRequest` or `StageFailed`: only that request fails."""

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] ids, [n, width] rows (conditioned stages) → [n, hidden] decoder inputs of generated tokens.

        Also called with prompt ids and no rows, for prompts without `embeds`. A stage model that yields rows of codes
        gets generated tokens as [n, groups], and prompt ids as [n].
        """

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, hidden] → (final hidden states [tokens, hidden], captured rows [tokens, capture_width] or None)."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32."""

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids, for stages that make text; other stages raise `StageFailed`."""


@dataclass(slots=True)
class AutoregressiveContext(LoadContext):
    """What the stage model of a decoder is built from."""

    quantization: str = "none"
    """Target format of the weights of linear layers: one of `segue.graph.deployment.options.QUANTIZATIONS`."""
    fused: bool = True
    """Linear layers with the same input may be fused into one GEMM."""
    group: Group | None = None
    """The ranks that share the weights; None: this process has them all."""
