"""Models whose layers keep a state: greedy tokens equal transformers' `generate`, however they are served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm_drive import TOKENS, Drive, Knowing
from causal_lm_family import STATES, Served, generate, make, prompts, varied
from causal_lm_family import load as load_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from segue.engines.autoregressive.cache.memory import prefix_states, state_bytes
from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import FlatBatch
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.autoregressive.speculation.ngram import NgramDrafter
from segue.engines.autoregressive.step.check import check_attention
from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import ConfigError, InvalidRequest
from segue.models.shared.decoder.states import find_states
from segue.models.shared.library import AutoModelForCausalLM
from segue.models.text.causal_lm.llm import LLM
from selection import daily

PROMPTS = prompts()


def load(directory: Path, **context: Any) -> LLM:
    """`entire…`: as where a scan is a kernel of another package, which goes on from no state."""
    adapter = load_model(directory, **context)
    if directory.name.startswith("entire"):
        assert adapter.kv.states is not None
        adapter.kv = replace(adapter.kv, states=replace(adapter.kv.states, continues=False))
    return adapter


@pytest.fixture(scope="module", params=daily(STATES, ("mamba2", "qwen3_next", "kimi_linear")))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(kind, tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    return varied(directory, PROMPTS, TOKENS)


def test_parity(directory: Path, expected: list[list[int]]) -> None:
    """In one batch with prefill in pieces, after hits, with few slots and few states kept, and after preemption."""
    adapter = load(directory)
    assert adapter.kv.states is not None
    assert adapter.kv.states.continues
    served = Served(adapter, max_tokens_per_step=48)
    assert served.run(PROMPTS, TOKENS) == expected
    assert served.engine.stats()["preemptions_total"] == 0
    few = Served(adapter, max_batch=3, prefix_states=4 * len(PROMPTS))
    assert few.run(PROMPTS, TOKENS) == expected
    hits = few.engine.stats()["prefix_hit_tokens_total"]
    assert few.run(PROMPTS, TOKENS) == expected
    assert few.engine.stats()["prefix_hit_tokens_total"] - hits > 500
    tight = Served(adapter, num_blocks=24, max_tokens_per_step=64)
    assert tight.run(PROMPTS, TOKENS) == expected
    # without attention, a sequence never needs a second block
    attends = adapter.kv.layout(adapter.max_model_len).tensors > 0
    assert (tight.engine.stats()["preemptions_total"] > 0) == attends


class Forgetful(nn.Module):
    """Forgets the state before several tokens in a way of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor, cache_params: Any, **named: Any) -> Any:
        state = None if cache_params is None else cache_params.get_recurrent_state(self.inner.layer_idx)
        if state is not None and hidden_states.shape[1] > 1:
            state.zero_()
        return self.inner(hidden_states, cache_params=cache_params, **named)


@pytest.mark.parametrize("forgets", [False, True])
def test_whether_a_text_goes_on_is_found(forgets: bool, tmp_path: Path) -> None:
    """By trying, not by the name of the model."""
    model = AutoModelForCausalLM.from_pretrained(make("jamba", tmp_path), dtype=torch.float32).eval()
    if forgets:
        model.model.layers[0].mamba = Forgetful(model.model.layers[0].mamba)
    embeds = model.get_input_embeddings()(torch.arange(24) * 7919 % 640)
    found = find_states(model.model, embeds, frozenset({"inputs_embeds", "past_key_values", "position_ids"}))
    assert found.layout.continues != forgets
    assert found.begun != forgets


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_layers_of_16_bits_between_hidden_states_of_32(kind: str, tmp_path: Path) -> None:
    """As these have them: they are compared as closely as 16 bits allow."""
    adapter = load(make(kind, tmp_path), dtype=torch.bfloat16)
    assert adapter.kv.states is not None
    assert adapter.kv.states.continues
    check_attention(adapter)
    prompt = torch.arange(20) * 7919 % 640
    batch = FlatBatch(prompt, None, torch.arange(20)[None], None)
    assert adapter.forward(adapter.embed(prompt, None), batch)[0].dtype == torch.float32


# --- what does not differ from kind to kind: without attention, with, with a scan, with one that takes no state -------


@pytest.fixture(scope="module", params=daily(("mamba2", "qwen3_next", "jamba", "entire"), ("qwen3_next", "entire")))
def some(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = "jamba" if request.param == "entire" else request.param
    return make(kind, tmp_path_factory.mktemp(request.param))


def test_joined_late(some: Path) -> None:
    expected = generate(some, PROMPTS[:24], TOKENS)
    drive = Drive(load(some), max_batch=24)
    for number, prompt in enumerate(PROMPTS[:24]):
        drive.add(str(number), prompt)
        drive.step()
    answers = drive.run()
    assert [answers[str(number), 0] for number in range(24)] == expected


def test_a_paused_one_gives_its_state_away(some: Path) -> None:
    """And begins anew: slots, not blocks, are short."""
    given = PROMPTS[12:28:4]
    drive = Drive(load(some), max_batch=2)
    for number in (0, 1):
        drive.add(str(number), given[number])
    for _ in range(4):
        drive.step()
    drive.engine.pause("0")
    drive.engine.pause("1")
    for number in (2, 3):
        drive.add(str(number), given[number])
    drive.run()
    assert drive.engine.stats()["preemptions_total"] > 0
    drive.engine.resume("0")
    drive.engine.resume("1")
    answers = drive.run()
    assert [answers[str(number), 0] for number in range(4)] == generate(some, given, TOKENS)


def test_steps_launched_ahead(some: Path) -> None:
    """Each step before the previous one completes, as on a GPU."""
    answers = Served(load(some), ahead=True, max_tokens_per_step=48).run(PROMPTS[:20], TOKENS)
    assert answers == generate(some, PROMPTS[:20], TOKENS)


@pytest.mark.parametrize("ahead", [False, True])
def test_input_that_is_appended(some: Path, ahead: bool) -> None:
    """In pieces and in turns; while one holds, others take the slot of its state, or do not need it."""
    first, second = PROMPTS[12], PROMPTS[16]
    [reply] = generate(some, [first], TOKENS)
    [after] = generate(some, [[*first, *reply, *second]], TOKENS)
    for slots in (1, 4):
        drive = Drive(load(some), max_batch=slots, ahead=ahead)
        drive.add("0", first[:5], then="hold")
        drive.run()
        drive.append("0", first[5:], "turn")
        assert drive.run()["0", 0] == reply
        drive.add("other", PROMPTS[20])
        assert drive.run()["other", 0] == generate(some, [PROMPTS[20]], TOKENS)[0]
        assert drive.engine.stats()["preemptions_total"] == (slots == 1)
        drive.append("0", second[:1], "hold")
        drive.append("0", second[1:], "end")
        assert drive.run()["0", 0] == [*reply, *after]
        assert drive.engine.stats()["blocks_used"] == 0


def test_prompts_with_a_common_beginning(some: Path) -> None:
    """Together, in pieces, dispatched ahead; then again, and with the replies before them."""
    adapter = load(some)
    assert adapter.kv.states is not None
    common = PROMPTS[-1][:45]
    given = [[*common, *prompt] for prompt in PROMPTS[:4]] + [common, common[:24], common]
    replies = generate(some, given, TOKENS)
    given += [[*prompt, *reply, 7, 9] for prompt, reply in zip(given[:2], replies, strict=False)]
    expected = replies + generate(some, given[len(replies) :], TOKENS)
    for sizes in ({"max_tokens_per_step": 13, "ahead": True}, {"prefix_states": 2}, {"num_blocks": 16}):
        drive = Drive(adapter, **{"max_batch": 4, "prefix_states": 30, **sizes})
        for again in range(2):
            for number, prompt in enumerate(given):
                drive.add(f"{again}.{number}", prompt)
            answers = drive.run()
            assert [answers[f"{again}.{number}", 0] for number in range(len(given))] == expected, sizes
        stats = drive.engine.stats()
        assert (stats["prefix_hit_tokens_total"] > 0) == adapter.kv.states.continues
        assert stats["prefix_states"] <= 30
    without = Drive(adapter, prefix_caching=False)
    without.add("one", given[0])
    without.add("same", given[0])
    answers = without.run()
    assert answers["one", 0] == answers["same", 0] == expected[0]
    assert without.engine.stats()["prefix_hit_tokens_total"] == 0


def test_drafts_that_are_rejected_leave_no_trace(some: Path) -> None:
    adapter = load(some)
    assert adapter.kv.states is not None
    if not adapter.kv.states.continues:
        with pytest.raises(ConfigError, match="does not continue with several tokens") as caught:
            Drive(adapter, drafter=NgramDrafter(1, 3))
        assert caught.value.field == "speculation"
        return
    given = [*PROMPTS[4:20:2], [11, 12, 13] * 8]
    expected = generate(some, given, TOKENS)
    known = [[*prompt, *reply] for prompt, reply in zip(given, expected, strict=True)]
    tight = {"num_blocks": 14, "max_tokens_per_step": 40}
    for drafter in (Knowing(known, 3), Knowing(known, 10**9), NgramDrafter(1, 3)):
        for sizes in ({}, {"prefix_caching": False, "max_batch": 2}, {"prefix_states": 1, **tight}):
            drive = Drive(adapter, drafter=drafter, **sizes)
            for number, prompt in enumerate(given):
                drive.add(f"{number}", prompt)
            answers = drive.run()
            assert [answers[f"{number}", 0] for number in range(len(given))] == expected, sizes
            stats = drive.engine.stats()
            if isinstance(drafter, Knowing):
                accepted, drafted = (stats[f"spec_{name}_tokens_total"] for name in ("accepted", "draft"))
                assert (0 < accepted < drafted) if drafter.lie == 3 else (0 < accepted == drafted)


def test_a_state_of_others_would_be_seen(some: Path) -> None:
    """What the test before this one can find: a reply hangs on the state that a hit gives."""
    adapter = load(some)
    assert adapter.kv.states is not None
    if not adapter.kv.states.continues:
        return
    replies = []
    for spoilt in (False, True):
        drive = Drive(adapter)
        drive.add("first", PROMPTS[-1])
        drive.run()
        store = drive.engine.resources.states
        assert store is not None
        if spoilt:
            for tensor in adapter.kv.states.tensors:
                every = torch.arange(9, 17)
                store.write(tensor.key, every, store.read(tensor.key, every).flip(-1))
        drive.add("again", PROMPTS[-1])
        replies.append(drive.run()["again", 0])
    assert replies[0] != replies[1]


@pytest.mark.parametrize("blocks", [128, 17])
def test_forks_go_on_from_a_copy(some: Path, blocks: int) -> None:
    adapter = load(some)
    sampled = {"temperature": 1.0, "top_p": 0.95}
    apart = Drive(adapter)
    for number, prompt in enumerate(PROMPTS[10:28:4]):
        for fork in range(4):
            apart.add(f"{number}.{fork}", prompt, seed=7 + fork, **sampled)
    together = Drive(adapter, num_blocks=blocks)
    for number, prompt in enumerate(PROMPTS[10:28:4]):
        together.add(str(number), prompt, seed=7, n=4, **sampled)
    alone, forked = apart.run(), together.run()
    assert len({tuple(ids) for ids in alone.values()}) > 15
    assert {(f"{name}.{fork}", 0): ids for (name, fork), ids in forked.items()} == alone


def test_beams(some: Path) -> None:
    expected = generate(some, PROMPTS[12:20], TOKENS, num_beams=3)
    drive = Drive(load(some))
    for number, prompt in enumerate(PROMPTS[12:20]):
        drive.add(str(number), prompt, beam_width=3)
    answers = drive.run()
    assert [answers[str(number), 0] for number in range(8)] == expected


def test_more_outputs_than_states_are_refused(some: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling.llm.n is 9; stage 'llm' keeps states of 8 sequences"):
        Drive(load(some)).add("many", PROMPTS[0], n=9)


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_whatever_happens_each_gets_its_own(some: Path, data: st.DataObject) -> None:
    """Adding, cancelling, pausing and resuming in any order, with few slots and blocks."""
    adapter, alone = STAGE_MODELS.setdefault(some, (load(some), {}))
    sizes = {"max_batch": data.draw(st.integers(3, 5)), "prefix_states": data.draw(st.integers(0, 6))}
    drive = Drive(adapter, **sizes, num_blocks=20, max_tokens_per_step=32)
    gone: set[str] = set()
    names: list[str] = []
    for number in range(data.draw(st.integers(4, 12))):
        match data.draw(st.sampled_from(["add", "add", "fork", "cancel", "pause", "step", "step"])):
            case "add":
                names.append(f"{number}")
                drive.add(names[-1], PROMPTS[number * 2])
            case "fork":
                names.append(f"{number}")
                drive.add(names[-1], PROMPTS[number * 2], n=3)
            case "cancel" if names:
                name = data.draw(st.sampled_from(names))
                gone.add(name)
                drive.engine.cancel(name)
            case "pause" if names:
                name = data.draw(st.sampled_from(names))
                drive.engine.pause(name)
                drive.step()
                drive.engine.resume(name)
            case _:
                drive.step()
        drive.engine.audit()
    answers = drive.run()
    for (name, _), ids in answers.items():
        if name not in gone:
            prompt = tuple(PROMPTS[int(name) * 2])
            if prompt not in alone:
                alone[prompt] = generate(some, [prompt], TOKENS)[0]
            assert ids == alone[prompt]
    assert {name for name, _ in answers} >= set(names) - gone


STAGE_MODELS: dict[Path, tuple[Any, dict[tuple[int, ...], list[int]]]] = {}


def test_a_state_that_is_lost_is_noticed_at_load(some: Path) -> None:
    """The check at load compares what goes on from a state with the library's own run."""
    adapter = load(some)
    check_attention(adapter)
    forward = adapter.forward

    def forgetful(embeds: torch.Tensor, batch: Any) -> Any:
        if batch.states is not None:
            groups = [replace(group, fresh=True) for group in batch.states.groups]
            batch.states = replace(batch.states, groups=groups)
        return forward(embeds, batch)

    adapter.forward = forgetful  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="run in pieces differs"):
        check_attention(adapter)


def test_what_a_state_cannot_do_is_refused(some: Path) -> None:
    adapter = load(some)
    with pytest.raises(ConfigError, match="deterministic does not support") as caught:
        AutoregressiveEngine(adapter, AutoregressiveConfig(num_blocks=8, deterministic=True))
    assert caught.value.field == "deterministic"
    with pytest.raises(ConfigError, match="takes no LoRA adapters") as caught:
        load(some, lora=LoraPlan())
    assert caught.value.field == "lora"


def test_states_are_counted(some: Path) -> None:
    adapter = load(some)
    assert adapter.kv.states is not None
    one = adapter.kv.states.slot_bytes
    assert state_bytes(adapter.kv, 7) == 8 * one > 0
    assert state_bytes(adapter.kv, 7, 5) == 13 * one
    continues = adapter.kv.states.continues
    for wanted, budget, kept in ((None, None, 7), (3, 9 * one, 3), (None, 28 * one, 5), (None, 8 * one, 0)):
        assert prefix_states(adapter.kv, 7, wanted, budget, caching=True) == (kept if continues else 0)
        assert prefix_states(adapter.kv, 7, wanted, budget, caching=False) == 0


def test_without_attention_there_is_no_end_to_the_context(tmp_path: Path) -> None:
    directory = make("mamba2", tmp_path, max_position_embeddings=None)
    assert load(directory).max_model_len == 8192
    assert load(directory, max_model_len=100_000).max_model_len == 100_000
