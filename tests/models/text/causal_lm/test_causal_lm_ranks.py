"""Two processes with a half of the weights each give what one gives, and what transformers gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from causal_lm_family import Served, generate, load, make, prompts
from rank_process import Second

from segue.engines.autoregressive.contract import AutoregressiveModel, FlatBatch
from segue.kernels.attention.paged_step import Part, paged_step
from segue.kernels.kv.store import KVStore
from segue.messages.errors import ConfigError
from segue.models.shared.library import AutoModelForCausalLM
from segue.parallel.group import Group
from segue.parallel.shard import shard
from segue.parallel.wire import dtype_of
from selection import daily

PROMPTS = prompts()[::3]
TOKENS = 14
IDS = torch.arange(33) * 7919 % 640


@torch.inference_mode()
def logits(adapter: AutoregressiveModel, length: int = 33, stored: str | None = None) -> torch.Tensor:
    """Of a prompt in one piece, and of one more token. `stored`: the dtype in which keys and values are kept."""
    store = KVStore(
        adapter.kv.layout(1),
        num_blocks=8,
        block_size=8,
        dtype=torch.float32,
        stored=None if stored is None else dtype_of(stored),
        device=adapter.device,
    )
    out = []
    for start, stop in ((0, length - 1), (length - 1, length)):
        step = paged_step(store, [Part([5, 1, 4, 2, 7], start, stop)])
        ids = IDS[start:stop]
        batch = FlatBatch(ids, None, torch.arange(start, stop)[None], step, [(None, start, stop)])
        hidden, _ = adapter.forward(adapter.embed(ids, None), batch)
        out.append(adapter.logits(hidden))
    return torch.cat(out)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def checkpoint(kind: str, directory: Path) -> Path:
    """`uneven`: a vocabulary that two do not divide, in one table for embedding and head."""
    return (
        make("llama", directory, vocab_size=671, tie_word_embeddings=True)
        if kind == "uneven"
        else make(kind, directory)
    )


@pytest.mark.parametrize(
    "kind", daily(("llama", "qwen3", "qwen3-moe", "gemma3", "olmo", "uneven"), ("qwen3-moe", "uneven"))
)
def test_two_equal_one(kind: str, tmp_path: Path, second: Second) -> None:
    """Logits; greedy tokens of ten prompts in one batch, in pieces, with prefix hits, and after preemption."""
    directory = checkpoint(kind, tmp_path / kind)
    whole = load(directory)
    expected = generate(directory, PROMPTS, TOKENS, min_new_tokens=TOKENS)
    assert len({tuple(answer) for answer in expected}) == 10
    with second.led(directory) as led:
        assert difference(led.both(logits), logits(whole)) < 1e-5
        assert led.weight_bytes < 0.6 * whole.weight_bytes  # half, and what the layout of small weights pads
        if kind != "olmo":  # its plan gathers the heads
            assert 2 * led.kv.kv_heads == whole.kv.kv_heads
        served = Served(led, max_tokens_per_step=24)
        assert served.run(PROMPTS, TOKENS, min_tokens=TOKENS) == expected
        hits = served.engine.stats()["prefix_hit_tokens_total"]
        assert served.run(PROMPTS, TOKENS, min_tokens=TOKENS) == expected
        assert served.engine.stats()["prefix_hit_tokens_total"] > hits + 100
        groups = led.kv.layout(led.max_model_len).groups
        # steps are dispatched ahead on the followers, too
        tight = Served(led, ahead=True, num_blocks=16 + 5 * (groups - 1), max_tokens_per_step=64)
        assert tight.run(PROMPTS, TOKENS, min_tokens=TOKENS) == expected
        assert tight.engine.stats()["preemptions_total"] > 0
    assert second.weight_bytes == led.weight_bytes


def test_keys_and_values_in_eight_bits(tmp_path: Path, second: Second) -> None:
    """Every rank rounds those of its own heads, as one process does."""
    directory = make("llama", tmp_path / "llama")
    whole = load(directory)
    fp8 = "float8_e4m3fn"
    rounded = logits(whole, stored=fp8)
    assert difference(rounded, logits(whole)) > 1e-2
    with second.led(directory) as led:
        assert difference(led.both(logits, 33, fp8), rounded) < 1e-5
        served = Served(led, kv_dtype="fp8", max_tokens_per_step=24)
        assert served.run(PROMPTS, TOKENS) == Served(whole, kv_dtype="fp8").run(PROMPTS, TOKENS)


@pytest.mark.parametrize(("kind", "within"), [("int8", 0.3), ("int4", 0.65)])
def test_quantised_weights(kind: str, within: float, tmp_path: Path, second: Second) -> None:
    """As close to the exact model as one process is; the same answers in any batch."""
    directory = make("llama", tmp_path / "llama")
    exact, alone = load(directory), load(directory, quantization=kind)
    with second.led(directory, quantization=kind) as led:
        error = float((led.both(logits) - logits(exact)).norm() / logits(exact).norm())
        assert 1e-4 < error < within
        assert led.weight_bytes < 0.75 * alone.weight_bytes
        together = Served(led, max_tokens_per_step=24).run(PROMPTS, TOKENS)
        assert together == [Served(led).run([prompt], TOKENS)[0] for prompt in PROMPTS]
        assert len({tuple(answer) for answer in together}) > 8
    assert second.weight_bytes == led.weight_bytes


def test_what_the_follower_holds_matters(tmp_path: Path, second: Second) -> None:
    """A second rank of another checkpoint: so its weights, its keys and its values are in the logits."""
    directory = make("llama", tmp_path / "one")
    whole = logits(load(directory))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[-1] *= 3
    model.save_pretrained(tmp_path / "other")
    with second.led(directory, tmp_path / "other") as led:
        assert difference(led.both(logits), whole) > 1e-3


def test_several_outputs_and_beams(tmp_path: Path, second: Second) -> None:
    """Copy-on-write on both ranks."""
    directory = make("qwen3", tmp_path / "qwen3")
    wishes: tuple[dict[str, Any], ...] = ({"n": 3, "top_k": 3}, {"n": 2, "beam_width": 3})
    for wish in wishes:
        expected = Served(load(directory)).run(PROMPTS[4:6], TOKENS, **wish)
        with second.led(directory) as led:
            assert Served(led).run(PROMPTS[4:6], TOKENS, **wish) == expected


def test_deterministic(tmp_path: Path, second: Second) -> None:
    directory = make("llama", tmp_path / "llama")
    expected = generate(directory, PROMPTS, TOKENS)
    with second.led(directory) as led:
        assert Served(led, deterministic=True).run(PROMPTS, TOKENS) == expected


def test_random_weights(tmp_path: Path, second: Second) -> None:
    """`load_format: dummy` makes each rank's part alone; what both have whole is equal, so all goes together."""
    directory = make("qwen3", tmp_path / "qwen3")
    with second.led(directory, load_format="dummy") as led:
        found = led.both(logits)
        assert bool(found.isfinite().all())
        assert torch.equal(led.both(logits), found)


# --- what cannot be divided ------------------------------------------------------------------------------------------


@dataclass
class Size:
    """As much of a group as cutting needs."""

    size: int
    rank: int = 0


@pytest.mark.parametrize(
    ("kind", "ranks", "named"),
    [
        ("gpt2", 2, "GPT2LMHeadModel.*no tensor parallel plan"),
        ("gpt-oss", 2, "GptOssForCausalLM.*no tensor parallel plan"),
        ("llama", 3, "num_attention_heads is 4.* by 3"),
        ("qwen3", 4, "num_key_value_heads is 2.* by 4"),
        ("opt", 2, "OPTForCausalLM.*plan"),
    ],
)
def test_refused(kind: str, ranks: int, named: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make(kind, tmp_path))
    with pytest.raises(ConfigError, match=named) as refused:
        shard(model, model.tp_plan, model.config, cast(Group, Size(ranks)))
    assert refused.value.field == "tensor_parallel"


def test_widths_and_styles_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    directory = make("llama", tmp_path, intermediate_size=97)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.\w+ has 97 features to divide, .* divisible by 2"):
        shard(model, model.tp_plan, model.config, cast(Group, Size(2)))
    plan = {**model.tp_plan, "model.layers.*.self_attn.o_proj": "sequence_parallel"}
    with pytest.raises(ConfigError, match=r"style 'sequence_parallel' for model\.layers\.0\.self_attn\.o_proj"):
        shard(AutoModelForCausalLM.from_pretrained(directory), plan, model.config, cast(Group, Size(2)))
