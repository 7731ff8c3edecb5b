"""The ways of `transformers` to generate text: `generate` on a padded batch, and `generate_batch`, its own continuous
batching. Imports torch and the library only when they are called, in a process that has set its threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

Prompts = Sequence[Sequence[int]]


class Clock:
    """A streamer that records each step's tokens and their time.monotonic(); the first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[Any] = []
        """Of each row of the batch, by step."""
        self.ended = 0.0
        self._prompt = True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self.times.append(time.monotonic())
            self.tokens.append(value)
        self._prompt = False

    def end(self) -> None:
        self.ended = time.monotonic()


def padded(prompts: Prompts, device: Any) -> tuple[Any, Any]:
    """Ids and attention mask [prompts, tokens of the longest], padded on the left."""
    import torch

    longest = max(len(prompt) for prompt in prompts)
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def generate(model: Any, ids: Any, mask: Any, tokens: int) -> tuple[Any, list[float]]:
    """One greedy call of `generate` for so many tokens: ids with the prompts, and each step's time.monotonic()."""
    import torch

    clock = Clock()
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            streamer=clock,
        )
    return made, clock.times


class Continuous:
    """Calls of `generate_batch`, which must not run under `inference_mode`. Its manager is kept between calls."""

    BLOCK = 32
    """Tokens of a KV block."""

    def __init__(self, model: Any, blocks: int, **settings: Any) -> None:
        """`blocks`: of the KV cache; `settings`: arguments of `generate_batch`."""
        self._model, self._blocks, self._settings = model, blocks, settings
        self._size: object = None

    def run(self, prompts: Prompts, tokens: int, size: object) -> dict[str, Any]:
        """The library's outputs. Calls with another `size` than the last one get a new manager."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if size != self._size:
            self._model.destroy_cached_continuous_batching_manager()
            self._size = size
        outputs: dict[str, Any] = self._model.generate_batch(
            inputs=[list(prompt) for prompt in prompts],
            generation_config=GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(block_size=self.BLOCK, num_blocks=self._blocks),
            record_timestamps=True,
            persistent_manager=True,
            **self._settings,
        )
        return outputs


def answers(outputs: dict[str, Any], prompts: Prompts) -> list[tuple[list[int], list[float]]]:
    """Token ids and times (time.perf_counter()) of each prompt. Raises `RuntimeError` if one failed."""
    # by the number at the end of the library's ids (`req_7`)
    found = [outputs[key] for key in sorted(outputs, key=lambda key: int(key.rpartition("_")[2]))]
    for prompt, output in zip(prompts, found, strict=True):
        if output.error is not None:
            raise RuntimeError(f"generate_batch: {output.error}")
        if output.prompt_ids != list(prompt):
            raise RuntimeError("generate_batch returned its answers in another order than the prompts")
    return [(output.generated_tokens, output.timestamps or []) for output in found]
