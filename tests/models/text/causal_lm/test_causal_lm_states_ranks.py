"""Models whose layers keep a state, on two processes: the answers of transformers, however they are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from causal_lm_drive import TOKENS, Drive, Knowing
from causal_lm_family import Served, generate, load, make, prompts
from rank_process import Second

from segue.engines.autoregressive.contract import AutoregressiveModel, FlatBatch
from segue.kernels.attention.paged_step import Part, paged_step
from segue.kernels.kv.states import StateStore, Stretch, state_step
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError
from segue.models.shared.library import AutoModelForCausalLM
from segue.parallel.group import Group
from segue.parallel.shard import shard
from selection import daily

PROMPTS = prompts()[::3]
EXPERTS = {
    "layers_block_type": ["mamba", "attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
}
DIVIDED: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "olmo_hybrid": {},
    "kimi_linear": {},
    "jamba": {},
    "granitemoehybrid": {},
    "lfm2_moe": {},
    "nemotron_h": EXPERTS,
}
"""Those with a plan, by model type: what differs from the small checkpoints of other tests."""


@pytest.mark.parametrize("kind", daily(DIVIDED, ("qwen3_next",)))
def test_two_equal_one(kind: str, tmp_path: Path, second: Second) -> None:
    """Greedy tokens of ten prompts in one batch, in pieces, with prefix hits, and after preemption."""
    directory = make(kind, tmp_path / kind, **DIVIDED[kind])
    whole = load(directory)
    expected = generate(directory, PROMPTS, TOKENS, min_new_tokens=TOKENS)
    assert len({tuple(answer) for answer in expected}) == 10
    with second.led(directory) as led:
        assert led.weight_bytes < 0.9 * whole.weight_bytes
        assert led.kv.states == whole.kv.states  # no plan divides what a mixer keeps
        assert led.kv.states is not None
        served = Served(led, max_batch=4, prefix_states=40, max_tokens_per_step=24)
        assert served.run(PROMPTS, TOKENS, min_tokens=TOKENS) == expected
        hits = served.engine.stats()["prefix_hit_tokens_total"]
        assert served.run(PROMPTS, TOKENS, min_tokens=TOKENS) == expected
        assert (served.engine.stats()["prefix_hit_tokens_total"] > hits + 100) == led.kv.states.continues
        # steps are dispatched ahead on the followers, too
        tight = Served(led, ahead=True, num_blocks=16, max_tokens_per_step=64)
        assert tight.run(PROMPTS, TOKENS, min_tokens=TOKENS) == expected
        assert tight.engine.stats()["preemptions_total"] > 0
    assert second.weight_bytes == led.weight_bytes


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mixers of which every process computes a part of the inputs, and the states whole."""
    return make("qwen3_next", tmp_path_factory.mktemp("qwen3_next"))


def test_forks_and_beams(directory: Path, second: Second) -> None:
    """Copies of states are made by all."""
    wishes: tuple[dict[str, Any], ...] = ({"n": 3, "temperature": 1.0, "seed": 7}, {"n": 2, "beam_width": 3})
    for wish in wishes:
        answers = []
        for adapter in (load(directory), None):
            with second.led(directory) as led:
                drive = Drive(adapter or led)
                for number, prompt in enumerate(PROMPTS[4:7]):
                    drive.add(f"{number}", prompt, **wish)
                answers.append(drive.run())
        assert answers[0] == answers[1]
        assert len({tuple(answer) for answer in answers[0].values()}) > 3


def test_drafts(directory: Path, second: Second) -> None:
    """Where one is rejected, all go back to the state before it."""
    expected = generate(directory, PROMPTS, TOKENS)
    known = [[*prompt, *reply] for prompt, reply in zip(PROMPTS, expected, strict=True)]
    with second.led(directory) as led:
        drive = Drive(led, drafter=Knowing(known, 3))
        for number, prompt in enumerate(PROMPTS):
            drive.add(f"{number}", prompt)
        answers = drive.run()
        stats = drive.engine.stats()
    assert [answers[f"{number}", 0] for number in range(len(PROMPTS))] == expected
    assert 0 < stats["spec_accepted_tokens_total"] < stats["spec_draft_tokens_total"]


@torch.inference_mode()
def last(adapter: AutoregressiveModel, copied: list[tuple[int, int]]) -> torch.Tensor:
    """Logits behind a text whose last token goes on from the state in slot 3. The others wrote theirs to slot 1."""
    ids = torch.arange(20) * 7919 % 640
    options: dict[str, Any] = {"num_blocks": 8, "block_size": 8, "dtype": torch.float32, "device": adapter.device}
    store = KVStore(adapter.kv.layout(1), **options)
    assert adapter.kv.states is not None
    states = StateStore(adapter.kv.states, 4, adapter.device)
    hidden = torch.empty(0)
    for start, stop, slot in ((0, len(ids) - 1, 1), (len(ids) - 1, len(ids), 3)):
        batch = FlatBatch(
            ids[start:stop],
            None,
            torch.arange(start, stop)[None],
            paged_step(store, [Part([5, 1, 4], start, stop)]),
            [(None, start, stop)],
            state_step(states, [Stretch(slot, start, stop)]),
        )
        hidden, _ = adapter.forward(adapter.embed(batch.token_ids, None), batch)
        states.copy(copied)
    return adapter.logits(hidden[-1:])


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_what_the_follower_keeps_matters(directory: Path, tmp_path: Path, second: Second) -> None:
    """Its states, and their copies, are in the logits: those of another convolution give others."""
    alone = load(directory)
    expected = last(alone, [(1, 3)])
    assert difference(last(alone, []), expected) > 1e-3
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].linear_attn.conv1d.weight *= 2
    model.save_pretrained(tmp_path / "other")
    for theirs, same in ((directory, True), (tmp_path / "other", False)):
        with second.led(directory, theirs) as led:
            assert (difference(led.both(last, [(1, 3)]), expected) < 1e-5) == same


# --- what cannot be divided ------------------------------------------------------------------------------------------


class Two:
    """As much of a group as cutting needs."""

    size = 2
    rank = 0


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("mamba2", {}, "Mamba2ForCausalLM.*no tensor parallel plan"),
        ("bamba", {}, "BambaForCausalLM.*no tensor parallel plan.*for its layers"),
        ("falcon_h1", {}, "FalconH1ForCausalLM.*no tensor parallel plan.*for its layers"),
        ("lfm2", {}, "Lfm2ForCausalLM.*no tensor parallel plan.*for its layers"),
        # their plans name experts alone
        ("nemotron_h", {}, "NemotronHForCausalLM.*divides none of the layers that it has"),
        ("granitemoehybrid", {"num_local_experts": 0}, "GraniteMoeHybridForCausalLM.*divides none of the layers"),
    ],
)
def test_refused(kind: str, changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make(kind, tmp_path, **changes))
    with pytest.raises(ConfigError, match=named) as refused:
        shard(model, model.tp_plan, model.config, cast(Group, Two()))
    assert refused.value.field == "tensor_parallel"
