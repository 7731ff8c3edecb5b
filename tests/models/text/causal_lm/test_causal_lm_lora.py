"""Several LoRA adapters in one flat batch: each request gets what transformers gives with its adapter merged."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_lm_family import Served, add, generate, load, make, prompts
from safetensors.torch import load_file, save_file

from lora_files import make_adapter, merge
from segue.graph.deployment.options import LoraPlan
from segue.kernels.graphs.compiled import compile_layers
from segue.kernels.linear.lora import Lora, LoraLinear, LoraSwitch, Pair, lora_step
from segue.messages.errors import ConfigError, NotFound
from segue.messages.sampling import FALLBACK, SamplingParams

PROMPTS = prompts()[:18]
TOKENS = 12
TARGETS = {
    "llama": (("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), ("q_proj", "v_proj")),
    "gpt2": (("c_attn", "c_proj", "c_fc"), ("c_attn",)),
    "qwen3-moe": (("q_proj", "v_proj", "o_proj"), ("k_proj",)),
    "phi3": (("qkv_proj", "gate_up_proj"), ("o_proj", "down_proj")),
}


class Home:
    """A checkpoint, two adapters for it, and what transformers gives with each of them and without."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.base = make(kind, directory / "base")
        wide, narrow = TARGETS[kind]
        self.paths = {
            "wide": make_adapter(self.base, directory / "wide", wide, rank=8, seed=1),
            "narrow": make_adapter(self.base, directory / "narrow", narrow, rank=3, seed=2, use_rslora=True, alpha=4),
        }
        merged = {name: merge(self.base, path, directory / f"{name}-merged") for name, path in self.paths.items()}
        self.expected: dict[str | None, list[list[int]]] = {
            name: generate(where, PROMPTS, TOKENS) for name, where in ({None: self.base} | merged).items()
        }

    def plan(self, **changes: Any) -> LoraPlan:
        return LoraPlan({name: str(path) for name, path in self.paths.items()}, **changes)


@pytest.fixture(scope="module", params=TARGETS)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home("llama", tmp_path_factory.mktemp("llama"))


NAMES: tuple[str | None, ...] = ("wide", None, "narrow")


def ask(served: Served, given: Sequence[tuple[str | None, Sequence[int]]], tokens: int = TOKENS) -> list[list[int]]:
    """Greedy answers of (adapter, prompt), all in one engine at once."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens).over(FALLBACK)
    answers: list[list[int]] = [[] for _ in given]
    for index, (adapter, prompt) in enumerate(given):
        add(served, str(index), adapter, prompt, params)
    while served.engine.has_work():
        outputs = served.engine.step()
        served.engine.audit()
        for output in outputs:
            assert output.error is None, output.error
            answers[int(output.request_id)] += output.token_ids
    return answers


def mixed(home: Home) -> tuple[list[tuple[str | None, Sequence[int]]], list[list[int]]]:
    """Every prompt with every adapter and none, by turns, and the answers."""
    given = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    return given, [home.expected[name][place] for place in range(len(PROMPTS)) for name in NAMES]


def test_parity(home: Home) -> None:
    """In one batch, with prefill in pieces, with prefix hits, and after preemption."""
    given, expected = mixed(home)
    for one, other in (("wide", None), ("narrow", None), ("wide", "narrow")):
        differ = sum(a != b for a, b in zip(home.expected[one], home.expected[other], strict=True))
        assert differ > len(PROMPTS) * 0.7, "the adapters must matter"
    adapter = load(home.base, lora=home.plan())
    served = Served(adapter, max_tokens_per_step=48)
    assert ask(served, given) == expected
    hits = served.engine.stats()["prefix_hit_tokens_total"]
    assert ask(served, given) == expected
    assert served.engine.stats()["prefix_hit_tokens_total"] > hits
    tight = Served(adapter, num_blocks=28, max_tokens_per_step=64)
    assert ask(tight, given) == expected
    assert tight.engine.stats()["preemptions_total"] > 0


def test_a_layer_left_out_changes_the_answers(llama: Home, tmp_path: Path) -> None:
    """What the parity test compares depends on single layers of an adapter."""
    tensors = load_file(llama.paths["wide"] / "adapter_model.safetensors")
    key = next(key for key in tensors if "layers.1" in key and "o_proj.lora_B" in key)
    tensors[key] = torch.zeros_like(tensors[key])
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((llama.paths["wide"] / "adapter_config.json").read_bytes())
    served = Served(load(llama.base, lora=LoraPlan({"wide": str(tmp_path)})))
    assert ask(served, [("wide", prompt) for prompt in PROMPTS]) != llama.expected["wide"]


def test_the_prefix_cache_never_mixes_adapters(llama: Home) -> None:
    served = Served(load(llama.base, lora=llama.plan()))
    place = max(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))
    for name in NAMES:
        before = served.engine.stats()["prefix_hit_tokens_total"]
        assert ask(served, [(name, PROMPTS[place])]) == [llama.expected[name][place]]
        assert served.engine.stats()["prefix_hit_tokens_total"] == before, "another's blocks"
        assert ask(served, [(name, PROMPTS[place])]) == [llama.expected[name][place]]
        assert served.engine.stats()["prefix_hit_tokens_total"] > before, "its own"


def test_load_and_unload_while_requests_run(llama: Home) -> None:
    adapter = load(llama.base, lora=LoraPlan(max_adapters=1))
    assert adapter.lora is not None
    served = Served(adapter)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS).over(FALLBACK)
    place = max(range(len(PROMPTS)), key=lambda index: len(llama.expected["wide"][index]))
    answers: dict[str, list[int]] = {"none": [], "first": [], "second": []}

    def steps(count: int) -> None:
        for _ in range(count):
            for output in served.engine.step():
                assert output.error is None
                answers[output.request_id] += output.token_ids

    add(served, "none", None, PROMPTS[place], params)
    steps(2)
    adapter.lora.load("poet", str(llama.paths["wide"]))
    add(served, "first", "poet", PROMPTS[place], params)
    steps(2)
    adapter.lora.unload("poet")
    with pytest.raises(NotFound, match="no LoRA adapter 'poet'"):
        add(served, "late", "poet", PROMPTS[place], params)
    adapter.lora.load("poet", str(llama.paths["narrow"]))  # the same name, other weights
    add(served, "second", "poet", PROMPTS[place], params)
    while served.engine.has_work():
        steps(1)
    assert answers == {
        "none": llama.expected[None][place],
        "first": llama.expected["wide"][place],
        "second": llama.expected["narrow"][place],
    }


def test_an_unknown_adapter_is_named_with_its_nearest(llama: Home) -> None:
    served = Served(load(llama.base, lora=llama.plan()))
    with pytest.raises(NotFound, match="no LoRA adapter 'wid'; did you mean 'wide'"):
        ask(served, [("wid", [1, 2])])
    with pytest.raises(NotFound, match="this stage has none"):
        ask(Served(load(llama.base)), [("wide", [1, 2])])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_steps_with_adapters_are_not_replayed(llama: Home) -> None:
    """Recorded decode steps know the model's own weights alone."""
    given, expected = mixed(llama)
    served = Served(load(llama.base, lora=llama.plan()), attention="triton", max_batch=4)
    for some in (given[:3], given[1:2]):
        assert ask(served, some, 3) == [expected[given.index(one)][:3] for one in some]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_compiled_layers_with_adapters(llama: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps with adapters and steps without; what is compiled in the first steps is all there is."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    given, expected = mixed(llama)
    adapter = load(llama.base, lora=llama.plan())
    assert compile_layers(adapter.library_decoder, "cpu") > 1
    served = Served(adapter, max_tokens_per_step=48)
    plain = [(None, prompt) for prompt in PROMPTS[:3]]
    assert ask(served, plain) == llama.expected[None][:3]
    assert any(path.suffix == ".so" for path in tmp_path.rglob("*")), "something was compiled"
    with torch.compiler.set_stance("fail_on_recompile"):
        assert ask(served, given[:18]) == expected[:18]
        assert ask(served, plain[::-1]) == llama.expected[None][2::-1]


# ── what is refused ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"something_new": 3}, "something_new is 3"),
        ({"r": 4}, r"lora_B of .* are \[8, 96\] and \[64, 8\]; its config and this model ask for \[4, 96\]"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"rank_pattern": 3}, "rank_pattern is 3"),
    ],
)
def test_configs_that_are_refused(llama: Home, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = llama.paths["wide"]
    config = json.loads((path / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").symlink_to(path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(llama.base, lora=LoraPlan({"a": str(tmp_path)}))


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", torch.ones(64), "is not a lora_A"),
        ("base_model.model.lm_head.lora_A.weight", torch.ones(8, 64), "'lm_head', which is not a linear layer of"),
        ("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", torch.ones(8, 64), "did you mean"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", torch.full((8, 64), torch.inf), "finite"),
    ],
)
def test_tensors_that_are_refused(llama: Home, tmp_path: Path, key: str, tensor: torch.Tensor, message: str) -> None:
    path = llama.paths["wide"]
    tensors = load_file(path / "adapter_model.safetensors") | {key: tensor}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").symlink_to(path / "adapter_config.json")
    with pytest.raises(ConfigError, match=message):
        load(llama.base, lora=LoraPlan({"a": str(tmp_path)}))


def test_files_ranks_and_counts_that_are_refused(llama: Home, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config.json: not there, so .* is no LoRA adapter"):
        load(llama.base, lora=LoraPlan({"a": str(tmp_path)}))
    (tmp_path / "adapter_config.json").symlink_to(llama.paths["wide"] / "adapter_config.json")
    with pytest.raises(ConfigError, match=r"adapter_config.json: cannot be read: File name too long") as refused:
        load(llama.base, lora=LoraPlan({"a": str(tmp_path / ("a" * 300))}))
    assert refused.value.field == "lora_path"
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors: not there"):
        load(llama.base, lora=LoraPlan({"a": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"rank 8, more than lora.max_rank of this stage \(4\)"):
        load(llama.base, lora=llama.plan(max_rank=4))
    adapter = load(llama.base, lora=llama.plan(max_adapters=2))
    assert adapter.lora is not None
    with pytest.raises(ConfigError, match="already; unload it first"):
        adapter.lora.load("wide", str(llama.paths["wide"]))
    with pytest.raises(ConfigError, match=r"2 adapters are loaded already \(lora.max_adapters\)"):
        adapter.lora.load("third", str(llama.paths["wide"]))


def test_patterns_of_rank_and_scale(llama: Home, tmp_path: Path) -> None:
    """Layers may differ in rank and alpha, by the ends of their names."""
    path = make_adapter(llama.base, tmp_path / "a", ("q_proj",), rank=4, seed=3, alpha=8)
    config = json.loads((path / "adapter_config.json").read_text())
    config |= {"r": 99, "rank_pattern": {"q_proj": 4}, "lora_alpha": 1, "alpha_pattern": {r"layers\.\d+\..*q_proj": 8}}
    merged = merge(llama.base, path, tmp_path / "merged")
    (path / "adapter_config.json").write_text(json.dumps(config))
    served = Served(load(llama.base, lora=LoraPlan({"a": str(path)})))
    assert ask(served, [("a", prompt) for prompt in PROMPTS]) == generate(merged, PROMPTS, TOKENS)


# ── the layer ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_at_once_is_one_by_one() -> None:
    """The way of GPUs: all adapters in two GEMMs; one whose numbers overflow spoils nobody else's."""
    generator = torch.Generator().manual_seed(0)

    def lora(name: str, *ranks: int) -> Lora:
        pairs = {
            f"layer{place}": Pair(
                torch.randn(rank, 12, generator=generator), torch.randn(20, rank, generator=generator)
            )
            for place, rank in enumerate(ranks)
            if rank
        }
        return Lora(name, name.encode(), pairs)

    loras = [lora("a", 3, 2), lora("b", 5), lora("c", 0, 4)]
    huge = Lora("d", b"d", {"layer0": Pair(torch.full((2, 12), 3e38), torch.ones(20, 2))})
    spans: list[tuple[Lora | None, int, int]] = [
        (loras[0], 0, 2), (None, 2, 5), (loras[1], 5, 6), (loras[0], 6, 9), (loras[2], 9, 10), (huge, 10, 11),
    ]  # fmt: skip
    for place in range(3):
        switch = LoraSwitch()
        layer = LoraLinear(torch.nn.Linear(12, 20), f"layer{place}", 12, 20, switch)
        x = torch.randn(1, 11, 12, generator=generator).abs() * 9
        step = lora_step(spans, x.device)
        assert step is not None
        with torch.inference_mode(), switch.during(step):
            apart = layer(x)[0]
            together = layer.base(x)[0]
            layer.add_at_once(together, x[0], step)
            again = layer.base(x)[0]
            layer.add_at_once(again, x[0], step)
        assert torch.equal(together[:10], again[:10])
        torch.testing.assert_close(together[:10], apart[:10], rtol=1e-5, atol=1e-4)
        changed = (apart - layer.base(x)[0]).abs().amax(1) > 0
        for owner, begin, end in spans:
            assert bool(changed[begin:end].all()) == (owner is not None and f"layer{place}" in owner.pairs)
        assert not torch.isfinite(apart[10]).all() or place


def test_rows_that_are_no_tokens_are_an_error() -> None:
    switch = LoraSwitch()
    layer = LoraLinear(torch.nn.Linear(4, 4), "experts", 4, 4, switch)
    lora = Lora("a", b"a", {})
    with switch.during(lora_step([(lora, 0, 3)], torch.device("cpu"))), pytest.raises(ValueError, match="2 rows in a"):
        layer(torch.zeros(2, 4))
    assert layer(torch.zeros(2, 4)).shape == (2, 4)
