"""The shapes of a decoder's first steps, run once before it serves: the first request is as fast as the second.

Libraries build and load their kernels at the first call of a shape, some milliseconds each. The steps run here on a
store of their own and draw from no generator, so nothing of them is left: no block, no counter, no random state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveAdapter, FlatBatch
from segue.engines.autoregressive.memory import stored_as
from segue.engines.autoregressive.penalties import RowRules
from segue.engines.autoregressive.sampler import RowSampler, choose
from segue.kernels.kv_store import KVStore
from segue.kernels.paged_step import AttentionBackend, paged_step
from segue.kernels.part import Part
from segue.kernels.state_store import StateStore, Stretch, state_step
from segue.messages.sampling import SamplingParams

SECONDS = 2.0
"""No further shape is begun after so long: a large model on a CPU must start too."""
_PROMPT = 16
_LONGEST_PROMPT = 256


def warm_up(
    adapter: AutoregressiveAdapter,
    config: AutoregressiveConfig,
    backend: AttentionBackend | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Prefill and decode, small batches first, with the picking of tokens. `clock`: seconds."""
    began = clock()
    # all layers in one group: windows change which blocks are read, not the shapes of the network
    layout = adapter.kv.layout(max_model_len=1)
    most = max(min(config.max_batch, config.max_tokens_per_step), 1)
    size = config.block_size
    each = -(-(_PROMPT + 1) // size)
    blocks = max(most * each, -(-_LONGEST_PROMPT // size))
    store = adapter.kv.store(
        layout,
        num_blocks=blocks,
        block_size=size,
        dtype=adapter.kv.dtype,
        stored=stored_as(adapter.kv, config.kv_dtype).stored,
        device=adapter.device,
        backend=backend,
    )
    kept = adapter.kv.states
    states = None if kept is None else adapter.kv.state_store(kept, most, adapter.device)
    for count, tokens in _shapes(config, adapter.max_model_len, most):
        if tokens == 1:
            parts = [Part(range(row * each, (row + 1) * each), _PROMPT, _PROMPT + 1) for row in range(count)]
        else:
            parts = [Part(range(-(-tokens // size)), 0, tokens)]
        _step(adapter, store, parts, states)
        if clock() - began > SECONDS:
            return


def _shapes(config: AutoregressiveConfig, max_model_len: int, most: int) -> Iterator[tuple[int, int]]:
    """(sequences, tokens of each): what every first request meets, then larger batches and longer prompts in turn."""
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
def _step(adapter: AutoregressiveAdapter, store: KVStore, parts: list[Part], kept: StateStore | None) -> None:
    places = torch.cat([torch.arange(part.start, part.stop, device=adapter.device) for part in parts])
    ids = places % adapter.vocab_size
    prompts = [(None, part.start, part.stop) for part in parts]
    stretches = [Stretch(row, part.start, part.stop) for row, part in enumerate(parts)]
    states = None if kept is None else state_step(kept, stretches)
    batch = FlatBatch(ids, None, places.expand(adapter.axes, -1), paged_step(store, parts), list(prompts), states)
    hidden, _ = adapter.forward(adapter.embed(ids, None), batch)
    logits = adapter.logits(hidden[-len(parts) :])
    rules = RowRules(SamplingParams(), [], adapter.vocab_size, ())
    for temperature in (0.0, 1.0):
        sampler = RowSampler(seed=0, temperature=temperature, top_k=0, top_p=0.9, min_p=0.0, rules=rules)
        choose(logits, [sampler] * len(parts), [0] * len(parts))
