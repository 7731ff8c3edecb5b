"""What the autoregressive engine needs of a model: an adapter, per stage, written by the family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from segue.engines.contract import Payload, StageRequest
from segue.kernels.kv_layout import KVLayout, LayerShape, lay_out
from segue.kernels.kv_store import KVStore
from segue.kernels.look_back import Chunked, LookBack
from segue.kernels.lora import Lora
from segue.kernels.state_store import StateLayout, StateStep, StateStore
from segue.messages.errors import ConfigError
from segue.messages.sampling import SamplingParams


@dataclass(slots=True)
class KVSpec:
    """Shape of the KV cache of a decoder."""

    layers: int
    kv_heads: int
    head_dim: int
    """Of the keys, and of the values where `value_dim` does not say otherwise."""
    dtype: torch.dtype
    capture_width: int = 0
    """Width of the captured row per token (0: nothing is captured). Stored per block, beside K and V, so that a
    prefix-cache hit can give the rows it did not compute."""
    capture_dtype: torch.dtype = torch.float32
    value_dim: int | None = None
    windows: tuple[LookBack, ...] = ()
    """[layers] How far a layer looks back (`sliding_window` of `transformers`, or chunks). Layers give back what no
    later token sees. Empty: full attention everywhere."""
    shapes: tuple[LayerShape, ...] = ()
    """[layers] where they are not alike; `kv_heads`, `head_dim` and `value_dim` are not read then."""
    store: Callable[..., KVStore] = KVStore
    """What makes its caches: `KVStore`, or one whose blocks are on several ranks."""
    stored: torch.dtype | None = None
    """What keys and values are stored in; None: in `dtype`, in which they are computed."""
    mutual: frozenset[int] = frozenset()
    """The layers in which tokens of a prompt may see each other in both directions (`Prompt.mutual`)."""
    coarse: bool = False
    """The decoder rounds to 8 or 16 bits inside, whatever `dtype` says."""
    states: StateLayout | None = None
    """What it keeps of a sequence besides keys and values; None: nothing."""
    state_store: Callable[[StateLayout, int, torch.device], StateStore] = StateStore
    """What makes the stores of these: `StateStore`, or one whose slots are on several ranks."""
    beside: bool = False
    """Some of its layers look at what a prompt has beside its tokens (`Prompt.beside`); they keep nothing here."""
    gathered: bool = False
    """Its layers attend by themselves, over keys and values that are gathered for them: its steps are not recorded."""

    @property
    def stored_size(self) -> int:
        """Bytes of a stored number."""
        return (self.stored or self.dtype).itemsize

    def layout(self, max_model_len: int) -> KVLayout:
        """The layers in groups. Raises `ConfigError` where `windows` or `shapes` are not one per layer.

        A window, or a chunk, that no sequence outgrows is none. Captured rows live with the blocks of group 0 and are
        wanted for whole prompts: a decoder that captures, and has no layer with full attention, keeps everything.
        """
        for name, given in (("windows", self.windows), ("shapes", self.shapes)):
            if given and len(given) != self.layers:
                raise ConfigError(f"the KV spec has {len(given)} {name} for {self.layers} layers", field=name)
        shape = LayerShape(self.kv_heads, self.head_dim, self.value_dim or self.head_dim)
        windows = [None if _reaches(back, max_model_len) else back for back in self.windows]
        if not windows or (self.capture_width and None not in windows):
            if any(isinstance(back, Chunked) for back in windows):  # a window is told to attention, a chunk is not
                raise ConfigError("a decoder that captures rows needs a layer with full attention beside chunks")
            windows = [None] * self.layers
        return lay_out(self.shapes or [shape] * self.layers, windows, self.mutual)


def _reaches(back: LookBack, length: int) -> bool:
    """Whether every token of a sequence so long sees all before it."""
    return back is None or (back.size if isinstance(back, Chunked) else back) >= length


class TokenRule(Protocol):
    """What the library's `generate` for a family forbids from token to token, besides what sampling parameters say."""

    @property
    def remembers(self) -> bool:
        """What it forbids depends on which tokens came before, and not only on how many."""

    def saw(self, token: int) -> None:
        """One more generated token."""

    def copy(self) -> TokenRule:
        """One that goes on from here by itself."""

    def apply(self, logits: torch.Tensor, generated: int) -> None:
        """Set what may not come now to -inf, in place: `logits` [vocab] float32 after everything else has changed them;
        `generated` tokens were generated before."""


@dataclass(slots=True)
class Prompt:
    """What a request is prefilled with."""

    token_ids: list[int]
    """[T] ids, placeholders included: for penalties, for hashing, and for embedding where `embeds` is None."""
    embeds: torch.Tensor | None = None
    """[T, hidden]: used instead of embedding `token_ids`. Best on the host, where it is as long as the request lives: a
    step takes what it computes to the device, whose memory is keys' and values'."""
    looked_up: Sequence[tuple[int, int]] = ()
    """Ranges [start, stop) of tokens, in order, that are embedded by their ids although there are `embeds`, whose rows
    for them mean nothing."""
    positions: torch.Tensor | None = None
    """[axes, T] long, rotary positions (axes 3 for M-RoPE, 1 otherwise); None: 0..T-1 on every axis."""
    position_delta: int = 0
    """Position of generated token i is T + i + position_delta."""
    identity: Sequence[int | bytes] | None = None
    """[T] what each token *is*, for prefix caching, where ids do not say it (media content, upstream rows);
    None: the ids. An empty sequence means the prompt must not be shared."""
    mutual: Sequence[tuple[int, int]] = ()
    """Ranges [start, stop) of tokens, in order, that see each other in both directions, in the layers of
    `KVSpec.mutual`; all others see what is before them, and so do they in other layers. `identity` of each token in one
    must tell the whole of it."""
    modality_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens per modality, for usage."""
    adapter: object | None = None
    """What changes the weights for this sequence's tokens (LoRA), for the family's forward; `identity` must tell it. A
    step in which a sequence has one is not run as a recording."""
    beside: object | None = None
    """What layers of the decoder look at that is no token (pictures, by cross-attention), for the family's forward;
    `identity` must tell it. A step in which a sequence has any is not run as a recording."""
    rule: TokenRule | None = None
    """What the family forbids of this prompt's replies; each output has a copy of its own."""
    extras: dict[str, Any] = field(default_factory=dict)
    """The family's own, for its forward and transfers; per-token tensors are [T, …] and are sliced by the adapter."""


@dataclass(slots=True)
class Fed:
    """What a chunk from upstream meant."""

    prompt: Prompt | None = None
    """Set once, when the prompt is complete."""
    conditioning: torch.Tensor | None = None
    """[n, width]: rows for the next generated tokens: the k-th row ever given goes with generated token k."""
    tail: torch.Tensor | None = None
    """[width]: the row for every token after the last conditioning row; set when the stream has ended."""
    nothing: bool = False
    """The stream ended and there is nothing to generate: the request finishes (`stop`) without a token."""


@dataclass(slots=True)
class FlatBatch:
    """All tokens of a step, one request after the other."""

    token_ids: torch.Tensor
    """[tokens] long."""
    embeds: torch.Tensor | None
    """[tokens, hidden] where some request has its own embeddings (rows of others are embedded by `adapter.embed`)."""
    positions: torch.Tensor
    """[axes, tokens] long."""
    attention: Any
    """Passed to the decoder's forward as the keyword argument `paged`; reaches the registered attention function.
    None in the check at load, which runs one sequence under the library's own masks."""
    prompts: list[tuple[Prompt | None, int, int]] = field(default_factory=list)
    """Per request: its prompt, and the range [start, stop) of its sequence that is in this batch."""
    states: StateStep | None = None
    """The states of its sequences, for decoders that keep any (`KVSpec.states`); None where `attention` is."""


class Vocabulary(Protocol):
    """What a stage's tokens say."""

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each; joined, they are the text of all. Empty for tokens that stand for no text."""

    def name(self, token_id: int) -> str:
        """What a token without bytes is called, e.g. `<|im_end|>`; may be empty."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with no special tokens around it."""


class LoraHost(Protocol):
    """Keeps the LoRA adapters of a stage. A sequence keeps the adapter that it began with."""

    @property
    def loaded(self) -> Mapping[str, Lora]:
        """Those that requests can name. Ranks that load and unload the same in the same order give the same
        identities."""

    def load(self, name: str, directory: str) -> None:
        """Let requests name it. Raises `ConfigError` where it cannot be, or the name is taken."""

    def unload(self, name: str) -> None:
        """Let no further request name it; unknown names are ignored."""


@runtime_checkable
class Recordable(Protocol):
    """An adapter that may say that its `forward` does no more than run a network over the rows, ids and positions of a
    batch: on a CPU, steps of single tokens are then played back instead (`decode_graphs`)."""

    recordable: bool


@runtime_checkable
class TakesLora(Protocol):
    """An adapter whose stage can have LoRA adapters."""

    @property
    def lora(self) -> LoraHost | None:
        """None where the deployment gives the stage none."""


class AutoregressiveAdapter(Protocol):
    """A decoder as the engine sees it. All tensors on `device`."""

    device: torch.device
    kv: KVSpec
    axes: int
    """Rotary axes: 3 for M-RoPE, else 1."""
    vocab_size: int
    max_model_len: int
    weight_bytes: int
    """Of the loaded weights, in memory."""
    conditioned: bool
    """Each generated token's input needs a row from upstream; a request without its next row is not scheduled."""
    end_token_ids: frozenset[int]
    default_sampling: SamplingParams
    """The defaults of the family's own `generate` for this stage."""
    vocabulary: Vocabulary | None
    """None where the stage makes no text, or has no tokenizer."""

    def begin(self, request: StageRequest) -> Any:
        """State of a request, given back to `feed`. Raises `InvalidRequest`."""

    def feed(self, state: Any, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """One chunk from upstream. Raises `InvalidRequest` or `StageFailed`: only that request fails."""

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] ids, [n, width] rows (conditioned stages) → [n, hidden] decoder inputs of generated tokens.

        Also called with prompt ids and no rows, for prompts without `embeds`.
        """

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, hidden] → (final hidden states [tokens, hidden], captured rows [tokens, capture_width] or None)."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32."""

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids, for stages that make text; others raise `StageFailed`."""
