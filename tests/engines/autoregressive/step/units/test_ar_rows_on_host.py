"""Rows that a prompt brings lie on the host for as long as the request lives; a step takes its own to the device."""

from __future__ import annotations

import torch
from ar_adapter import TinyAdapter, stage_request, tiny_model

from segue.engines.autoregressive.contract import Fed, Prompt
from segue.engines.autoregressive.schedule.decision import ScheduledTokens
from segue.engines.autoregressive.sequence import Sequence
from segue.engines.autoregressive.step.inputs import flat_batch
from segue.kernels.attention.cross_attention import CrossStep
from segue.models.omni.multimodal_lm.cross.shown import Shown, Span
from segue.models.omni.multimodal_lm.cross.step_images import step_images
from segue.models.shared.decoder.kept_media import KeptMedia

ELSEWHERE = torch.device("meta")
"""Not the host's memory: what is left there cannot be mixed with what is here."""


def test_a_step_takes_the_rows_of_its_tokens_to_the_device() -> None:
    adapter = TinyAdapter(tiny_model("qwen2", seed=7))
    adapter.device = ELSEWHERE
    width = adapter.model.config.hidden_size
    sequence = Sequence(stage_request("r"), adapter, (0, 0.0, 0))
    prompt = Prompt(token_ids=[1, 2, 3, 4], embeds=torch.ones(4, width))
    sequence.feed(Fed(prompt=prompt), longest=100, block_size=8)
    embeds, batch = flat_batch(adapter, {sequence: ScheduledTokens(sequence.scheduled, 1, 2, 1)}, None, None)  # type: ignore[arg-type]
    assert (embeds.device, embeds.shape) == (ELSEWHERE, (2, width))
    assert batch.token_ids.device == ELSEWHERE
    assert prompt.embeds is not None
    assert prompt.embeds.device.type == "cpu"


def test_a_step_takes_the_images_that_it_must_look_at_to_the_device() -> None:
    seen = ((b"sea", 6),)
    shown = Shown({b"sea": torch.ones(6, 8)}, (Span(0, None, seen, True),))
    prompt = Prompt(token_ids=[1, 2, 3], cross_inputs=shown)
    positions = torch.arange(3, device=ELSEWHERE)
    others = step_images([(prompt, 0, 3)], positions, KeptMedia(frozenset({0}), 4, 64), [], torch.bfloat16)
    states = others["cross_attention_states"]
    assert (states.device, states.dtype, states.shape) == (ELSEWHERE, torch.bfloat16, (1, 6, 8))
    assert isinstance(others["across"], CrossStep)
    assert shown.rows[b"sea"].device.type == "cpu"
