"""Runs the shapes of a decoder's first steps before it serves, so that the first request is as fast as the second.

Libraries build and load their kernels at the first call of a shape, some milliseconds each. The warm-up steps use a
separate store and no generator, so they change no block, no counter and no random state of the engine.

Optional reading: called once, at load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from segue.engines.autoregressive.cache.memory import stored_as
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveModel, FlatBatch, embedded
from segue.engines.autoregressive.sample.penalties import RowRules
from segue.engines.autoregressive.sample.sampler import RowSampler, choose
from segue.kernels.attention.paged_step import AttentionBackend, Part, paged_step
from segue.kernels.kv.states import StateStore, Stretch, state_step
from segue.kernels.kv.store import KVStore
from segue.messages.sampling import SamplingParams
from segue.parallel.ranks import ALONE, Ranks

SECONDS = 2.0
"""No further shape starts after this time: a large model on a CPU must start too."""
_PROMPT = 16
_LONGEST_PROMPT = 256


def warm_up(
    model: AutoregressiveModel,
    config: AutoregressiveConfig,
    backend: AttentionBackend | None = None,
    clock: Callable[[], float] = time.monotonic,
    ranks: Ranks = ALONE,
) -> torch.Tensor:
    """Run prefill and decode, small batches first, including the sampling of tokens. `clock`: seconds. Returns final
    hidden states of one token [1, hidden]."""
    began = clock()
    # all layers in one group: windows change which blocks are read, not the shapes of the network
    layout = model.kv.layout(max_model_len=1)
    most = max(min(config.max_batch, config.max_tokens_per_step), 1)
    size = config.block_size
    each = -(-(_PROMPT + 1) // size)
    blocks = max(most * each, -(-_LONGEST_PROMPT // size))
    store = KVStore(
        layout,
        num_blocks=blocks,
        block_size=size,
        dtype=model.kv.dtype,
        stored=stored_as(model.kv, config.kv_dtype).stored,
        device=model.device,
        backend=backend,
    )
    kept = model.kv.states
    states = None if kept is None else StateStore(kept, most, model.device)
    for count, tokens in _shapes(config, model.max_model_len, most):
        if tokens == 1:
            parts = [Part(range(row * each, (row + 1) * each), _PROMPT, _PROMPT + 1) for row in range(count)]
        else:
            parts = [Part(range(-(-tokens // size)), 0, tokens)]
        hidden = _step(model, store, parts, states)
        if ranks.same(lambda: clock() - began > SECONDS, bool):
            break
    return hidden[-1:]


def _shapes(config: AutoregressiveConfig, max_model_len: int, most: int) -> Iterator[tuple[int, int]]:
    """(sequences, tokens of each): the shapes of a first request, then larger batches and longer prompts in turn."""
    longest = min(_LONGEST_PROMPT, config.max_tokens_per_step, max_model_len)
    yield 1, min(_PROMPT, longest)
    batch, prompt = 1, _PROMPT
    while batch <= most or prompt <= longest:
        if batch <= most:
            yield batch, 1
        prompt *= 2
        if prompt <= longest:
            yield 1, prompt
        batch *= 2


@torch.inference_mode()
def _step(model: AutoregressiveModel, store: KVStore, parts: list[Part], kept: StateStore | None) -> torch.Tensor:
    """Run one step; returns its final hidden states [tokens, hidden]."""
    places = torch.cat([torch.arange(part.start, part.stop, device=model.device) for part in parts])
    ids = places % model.vocab_size
    prompts = [(None, part.start, part.stop) for part in parts]
    stretches = [Stretch(row, part.start, part.stop) for row, part in enumerate(parts)]
    states = None if kept is None else state_step(kept, stretches)
    batch = FlatBatch(ids, None, places.expand(model.axes, -1), paged_step(store, parts), list(prompts), states)
    batch.places = [part.start for part in parts]
    hidden, _ = model.forward(embedded(model, batch), batch)
    logits = model.logits(hidden[-len(parts) :])
    rules = RowRules(SamplingParams(), [], model.vocab_size, ())
    for temperature in (0.0, 1.0):
        sampler = RowSampler(seed=0, temperature=temperature, top_k=0, top_p=0.9, min_p=0.0, rules=rules)
        choose(logits, [sampler] * len(parts), [0] * len(parts))
    return hidden
