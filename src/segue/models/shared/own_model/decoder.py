"""The stage model of a decoder with an embedding function of its own, and with turns of fixed length.

The network is the author's, unchanged: his `embed` makes the decoder's inputs, in place (learned positions, projected
tensors), his trunk runs under paged attention, his head makes the logits. At load, a short text with placeholders is
run by his own `forward` and by these parts apart; a model whose results differ is refused."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveContext, Fed, FlatBatch, KVSpec, Prompt, Then
from segue.engines.autoregressive.output import TokenOutput
from segue.engines.contract import Payload, StageRequest
from segue.kernels.prepare import prepared_bytes
from segue.messages.errors import ConfigError, InvalidRequest, StageFailed, TooLong, wrong
from segue.messages.sampling import SamplingParams
from segue.models.shared.checkpoint.checkpoint import held_bytes
from segue.models.shared.decoder.decoder import PagedDecoder, check_same
from segue.models.shared.decoder.generation import context_length, default_sampling, end_tokens, generation_of
from segue.models.shared.input_stage import THEN
from segue.models.shared.library import PreTrainedModel

TENSORS = "tensors"
"""Key of a piece's payload, and of `Prompt.extras`: name → the rows of its placeholders, in order."""
MODALITIES = "modality_tokens"
"""Key of a piece's payload: tokens per modality."""
_NEVER = -1e9
"""A logit whose probability is 0; an infinite one would be taken for a broken network's."""
_PROBE_AT = 5
"""Place of the first placeholder in the load check's short text."""


class Placeholder(NamedTuple):
    """How a named tensor stands in the sequence: one token for each row."""

    token_id: int
    row: tuple[int, ...]
    """Shape of a row: of an item that takes one token, or of an entry of its first axis."""
    dtype: torch.dtype = torch.float32


@dataclass(slots=True)
class _Tensors:
    """The rows of a piece's placeholders."""

    rows: dict[str, torch.Tensor]
    """Name → [placeholders, *row]"""
    before: dict[str, np.ndarray]
    """Name → [T + 1]: number of its placeholders before each token."""

    def within(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """The rows of tokens [start, stop) of the piece and of what was generated after it."""
        found = {}
        for name, rows in self.rows.items():
            before = self.before[name]
            last = len(before) - 1
            found[name] = rows[before[min(start, last)] : before[min(stop, last)]]
        return found


@dataclass(slots=True)
class _State:
    """A request at this stage."""

    length: int = 0
    """Tokens of its pieces and of the turns after them."""
    then: Then = Then.TURN


class OwnDecoder(ABC):
    """`AutoregressiveModel` (and `EmbedsInPlace`) over a model with its own embedding function.

    A subclass names the parts and defines `load`, `placeholders`, `embed_run` and, for turns, `turn_tokens`. Payloads
    of pieces: `token_ids` [T], `TENSORS`, `MODALITIES`, and what follows (`THEN`).
    """

    decoder: str
    """Dotted name of the transformers decoder inside the model: it takes `inputs_embeds` and `position_ids`."""
    head: str
    """Dotted name of the layer that maps its final hidden states to logits."""

    axes = 1
    conditioned = False
    recordable = True
    vocabulary = None

    def __init__(self, ctx: AutoregressiveContext) -> None:
        """Raises `ConfigError` for an unreadable checkpoint or a model that cannot be served."""
        self.network = self.load(ctx)
        trunk = self.network.get_submodule(self.decoder)
        if not isinstance(trunk, PreTrainedModel):
            raise ConfigError(f"{self.decoder} of {type(self.network).__name__} is no model of transformers")
        self.max_model_len: int = context_length(trunk.config, ctx.max_model_len)
        self._marks = self.placeholders
        self._turn = self.turn_tokens
        self.device: torch.device = next(trunk.parameters()).device
        with torch.inference_mode():
            self._decoder = PagedDecoder(
                self.network,
                trunk,
                config=trunk.config,
                quantization=ctx.quantization,
                fused=ctx.fused,
                rows=self._probe_rows,
                head=self.head,
                of_ids=self._probe,
            )
            self._flat = self._checked_flat()
        self.library_decoder = self._decoder.model
        self.kv: KVSpec = self._decoder.kv
        self.vocab_size: int = self._decoder.vocab_size
        self.weight_bytes: int = held_bytes(self.network) + prepared_bytes(self.network)
        generation = generation_of(ctx.model_dir, self.network.config)
        self.default_sampling: SamplingParams = SamplingParams(max_tokens=self._turn).over(default_sampling(generation))
        self.end_token_ids: frozenset[int] = frozenset() if self._turn is not None else end_tokens(generation, None)

    # --- what a subclass defines -------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, ctx: AutoregressiveContext) -> Any:
        """The author's model, on `ctx.device` in `ctx.dtype` (`load_author`)."""

    @property
    def placeholders(self) -> Mapping[str, Placeholder]:
        """Name of each tensor → its placeholder. The author's `forward` takes the tensors by these names."""
        return {}

    @property
    def turn_tokens(self) -> int | None:
        """Tokens of each turn, none more and none less; None: a turn ends by its end token."""
        return None

    @abstractmethod
    def embed_run(self, ids: torch.Tensor, start: int, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[1, t] consecutive tokens of one sequence, the first at place `start`; name → [1, n, *row] the rows of the
        placeholders among them, in order → decoder inputs [1, t, hidden]."""

    def embed_flat(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor | None:
        """[n] ids, of many sequences, [n] places → [n, hidden], as `embed_run` gives it, in one call; rows of
        placeholders mean nothing. Without it (None) each sequence of a step is a call of its own. It is compared with
        `embed_run` at load."""
        return None

    # --- the contract ------------------------------------------------------------------------------------------------

    def begin(self, request: StageRequest) -> _State:
        """Raises `InvalidRequest` for sampling that would end a turn early."""
        if self._turn is not None:
            check_fixed_turns(request, self._turn)
        return _State()

    def feed(self, state: _State, upstream: str, payload: Payload, *, final: bool) -> Fed:
        """A piece of the input, or its end."""
        if "token_ids" not in payload:
            if state.then is Then.HOLD and self._turn is not None:
                raise InvalidRequest("the input was closed where more must follow before a turn", field="append")
            return Fed(closed=True)
        state.then = Then(payload.get(THEN, "end"))
        ids = payload["token_ids"].tolist()
        state.length += len(ids)
        if state.then is not Then.HOLD:
            state.length += self._turn or 0
        if self._turn is not None and state.length > self.max_model_len:
            raise TooLong(
                f"the input and its turns have {state.length} tokens; this deployment holds {self.max_model_len}",
                field="messages",
            )
        rows: dict[str, torch.Tensor] = payload.get(TENSORS, {})
        for name, mark in self._marks.items():
            if (count := ids.count(mark.token_id)) != (found := len(rows.get(name, ()))):
                raise StageFailed(f"the input stage gave {found} rows of {name} for {count} placeholders")
        given = _Tensors(rows, {name: _counted(ids, self._marks[name].token_id) for name in rows})
        prompt = Prompt(
            token_ids=ids,
            identity=list(_identities(ids, rows, self._marks)) if rows else None,
            modality_tokens=payload.get(MODALITIES, {}),
            extras={TENSORS: given},
        )
        return Fed(prompt=prompt, then=state.then)

    def embed(self, token_ids: torch.Tensor, conditioning: torch.Tensor | None) -> torch.Tensor:
        """[n] ids → [n, hidden], each at place 0: only for its shape."""
        return torch.cat([self._run(one, 0, None) for one in token_ids.split(1)])

    def embed_batch(self, batch: FlatBatch) -> torch.Tensor:
        """[tokens, hidden] decoder inputs, each by its place and its piece's tensors."""
        sizes = [stop - start for _, start, stop in batch.prompts]
        given = [_given(prompt, start, stop) for prompt, start, stop in batch.prompts]
        flat = self.embed_flat(batch.token_ids, batch.positions[0]) if self._flat else None
        rows = [None] * len(sizes) if flat is None else flat.split(sizes)
        runs = zip(batch.token_ids.split(sizes), batch.places, given, rows, strict=True)
        return torch.cat(
            [
                done if done is not None and not _holds(tensors) else self._run(ids, place, tensors)
                for ids, place, tensors, done in runs
            ]
        )

    def forward(self, embeds: torch.Tensor, batch: FlatBatch) -> tuple[torch.Tensor, None]:
        """[tokens, hidden] → (final hidden states [tokens, hidden], nothing captured)."""
        return self._decoder.forward(embeds, batch), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab] float32; placeholders and ids unknown to the head are never drawn."""
        made = self._decoder.logits(hidden)
        made = torch.nn.functional.pad(made, (0, self.vocab_size - made.shape[1]), value=_NEVER)
        for mark in self._marks.values():  # nothing has rows for a drawn placeholder
            made[:, mark.token_id] = _NEVER
        return made

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """A subclass that makes text overrides it."""
        raise StageFailed("this stage makes no text")

    # --- parts -------------------------------------------------------------------------------------------------------

    def _run(self, ids: torch.Tensor, place: int, tensors: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
        """[t] consecutive tokens → [t, hidden]. `tensors` None: a dummy, whose placeholders get rows as well."""
        rows = self._dummies(ids) if tensors is None else tensors
        return self.embed_run(ids[None], place, {name: some[None].to(self.device) for name, some in rows.items()})[0]

    def _dummies(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows for the placeholders among dummy ids; values differ, so that a check sees them."""
        rows = {}
        for name, mark in self._marks.items():
            shape = (int((ids == mark.token_id).sum()), *mark.row)
            rows[name] = torch.arange(math.prod(shape), device=ids.device).reshape(shape).remainder(7).to(mark.dtype)
        return rows

    def _probe_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The short text with two placeholders of each tensor in it."""
        ids = ids.clone()
        for place, mark in enumerate(self._marks.values()):
            ids[_PROBE_AT + 2 * place : _PROBE_AT + 2 * place + 2] = mark.token_id
        return ids

    def _probe(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arguments of the author's own forward for the load check's text."""
        ids = self._probe_ids(ids)
        return {"input_ids": ids[None], **{name: rows[None] for name, rows in self._dummies(ids).items()}}

    def _probe_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._run(self._probe_ids(ids), 0, None)

    def _checked_flat(self) -> bool:
        """Whether there is an `embed_flat`; raises `ConfigError` if it differs from `embed_run`."""
        marks = {mark.token_id for mark in self._marks.values()}
        vocab = self._decoder.vocab_size
        plain = [token for token in range(0, vocab, max(1, vocab // 40)) if token not in marks][:32]
        ids = torch.tensor(plain, device=self.device)
        places = torch.arange(len(ids), device=self.device) * max(1, self.max_model_len // 40) % self.max_model_len
        flat = self.embed_flat(ids, places)
        if flat is None:
            return False
        apart = [self._run(one, int(place), None) for one, place in zip(ids.split(1), places, strict=True)]
        check_same(type(self.network).__name__, flat, torch.cat(apart), self._decoder.dtype, coarse=False)
        return True


def codes_of_turn(request: StageRequest, output: TokenOutput) -> Payload | None:
    """Transfer to the only downstream stage: the ids of a turn once it has ended, and how many came before it; an end
    token is one of them. One chunk for a turn and not for a token, because nothing can be made of a part of it."""
    start, ids = request.kept.setdefault(request.stage, (output.first_index, []))
    ids += output.token_ids
    # ids of an earlier attempt come at once, with the ends of their turns unmarked
    repeated = output.first_index < len(request.resume)
    if not (output.turn_ended or output.finished or repeated):
        return None
    del request.kept[request.stage]
    return {"codes": torch.tensor(ids, dtype=torch.long), "start": start} if ids else None


_ENDING = ("stop", "stop_token_ids", "repetition_detection", "structured_outputs", "thinking_token_budget")


def check_fixed_turns(request: StageRequest, tokens: int) -> None:
    """Raise `InvalidRequest` for sampling parameters that give a turn another number of tokens."""
    asked, at = request.sampling, f"sampling.{request.stage}"
    for name in ("max_tokens", "min_tokens"):
        value = getattr(asked, name)
        if value and (value > tokens or (name == "max_tokens" and value != tokens)):
            raise wrong(f"{at}.{name}", value, f"{tokens}, or left out: that is what each turn has")
    for name in _ENDING:
        if value := getattr(asked, name):
            raise wrong(f"{at}.{name}", value, f"left out: each turn has {tokens} tokens")


def _given(prompt: Prompt | None, start: int, stop: int) -> dict[str, torch.Tensor] | None:
    if prompt is None:
        return None
    tensors: _Tensors = prompt.extras[TENSORS]
    return tensors.within(start, stop)


def _holds(tensors: Mapping[str, torch.Tensor] | None) -> bool:
    """Whether there are rows, or may be: dummies have whatever their ids say."""
    return tensors is None or any(map(len, tensors.values()))


def _counted(ids: Sequence[int], token: int) -> np.ndarray:
    """[T + 1]: number of this token before each place."""
    return np.concatenate([[0], np.cumsum(np.array(ids) == token)])


def _identities(
    ids: Sequence[int], rows: Mapping[str, torch.Tensor], marks: Mapping[str, Placeholder]
) -> Iterator[int | bytes]:
    """The identity of each token for prefix caching: its id, or the hash of its placeholder's row."""
    names = {marks[name].token_id: name for name in rows}
    left = {name: iter(some) for name, some in rows.items()}
    for token in ids:
        name = names.get(token)
        if name is None:
            yield token
        else:
            row = next(left[name]).contiguous().cpu().numpy()
            yield hashlib.sha256(f"{name} {row.dtype} {row.shape} ".encode() + row.tobytes()).digest()
