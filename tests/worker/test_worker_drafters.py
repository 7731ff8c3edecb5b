"""From the deployment's `speculation` to an engine that speculates, over real (tiny) checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.engine import AutoregressiveEngine
from segue.engines.contract import StageRequest
from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.kinds.autoregressive import AutoregressivePlan
from segue.kernels.kv.states import StateLayout
from segue.messages.errors import ConfigError
from segue.messages.request import Request
from segue.messages.sampling import FALLBACK, SamplingParams
from segue.models.shared.checkpoint.checkpoint import Checkpoint
from segue.models.text.causal_lm import tiny
from segue.models.text.causal_lm.graph import graph
from segue.models.text.causal_lm.llm import LLM
from segue.worker.kinds.autoregressive.drafters import LoadedDrafter, load_drafter

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, max_tokens=24, ignore_eos=True),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints")
    for name, kind, seed in (
        ("qwen3", "qwen3", 0),
        ("other", "qwen3", 1),
        ("gemma3", "gemma3", 0),
        ("llama", "llama", 0),
    ):
        tiny.make(kind, path / name, seed=seed)
    return path


def context(directory: Path) -> AutoregressiveContext:
    return AutoregressiveContext(directory, "llm", torch.device("cpu"), torch.float32)


def stage(**speculation: Any) -> AutoregressivePlan:
    values = {"stages": {"llm": {"speculation": speculation, "block_size": 8}}}
    return load_plan(graph({}), values, hardware=Hardware(2, 1 << 30)).stages["llm"]


def loaded(directory: Path, adapter: LLM, **speculation: Any) -> LoadedDrafter:
    drafter = load_drafter(stage(**speculation), adapter, context(directory))
    assert drafter is not None
    return drafter


def served(
    adapter: LLM, sampling: SamplingParams, drafter: LoadedDrafter | None = None
) -> tuple[list[list[int]], float]:
    """Tokens of three prompts, and the share of drafts that was accepted."""
    speculation = None
    if drafter is not None:
        plan = stage(method="ngram", tokens=3, adaptive=False).speculation
        assert plan is not None
        speculation = drafter.speculation(plan, 128)
    engine = AutoregressiveEngine(adapter, AutoregressiveConfig(num_blocks=128, block_size=8), speculation=speculation)
    tokens: dict[str, list[int]] = {}
    for index, length in enumerate((5, 40, 23)):
        ids = (torch.arange(length) * 37 + index) % 600
        if index == 1:
            ids[20:] = ids[:20]  # something to look up
        request = StageRequest(
            f"r{index}", "llm", Request(request_id=f"r{index}"), sampling.over(FALLBACK), index, frozenset({"input"}),
            frozenset(), frozenset(),
        )  # fmt: skip
        engine.add(request)
        engine.feed(request.request_id, "input", {"token_ids": ids}, final=True)
        tokens[request.request_id] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
        engine.audit()
    stats = engine.stats()
    assert stats["spec_active"] == float(drafter is not None)
    return list(tokens.values()), stats["spec_accepted_tokens_total"] / max(1, stats["spec_draft_tokens_total"])


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def target(request, checkpoints):
    """Gemma 3 has layers with sliding windows beside others: two groups of blocks."""
    directory = checkpoints / request.param
    adapter = LLM(context(directory))
    return directory, adapter, {name: served(adapter, sampling)[0] for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_equal_plain_ones(target, sampling):
    directory, adapter, plain = target
    for speculation in ({"method": "ngram", "ngram_min": 1}, {"method": "draft", "model": str(directory)}):
        tokens, accepted = served(adapter, SAMPLINGS[sampling], loaded(directory, adapter, **speculation))
        assert tokens == plain[sampling]
    assert accepted > 0.9, "a model drafts well for itself, drawn or not"


def test_a_draft_model_that_thinks_otherwise(checkpoints):
    adapter = LLM(context(checkpoints / "qwen3"))
    drafter = loaded(checkpoints / "qwen3", adapter, method="draft", model=str(checkpoints / "other"))
    tokens, accepted = served(adapter, SAMPLINGS["greedy"], drafter)
    assert tokens == served(adapter, SAMPLINGS["greedy"])[0]
    assert accepted < 0.3
    assert drafter.weight_bytes == adapter.weight_bytes
    assert drafter.bytes_per_block(8) > 0


def test_a_multi_token_module_in_the_checkpoint(checkpoints, tmp_path):
    """Qwen3-Next's names beside a Qwen3 decoder; what is not trained is rejected."""
    directory = _with_module(checkpoints / "qwen3", tmp_path)
    adapter = LLM(context(directory))
    drafter = loaded(directory, adapter, method="mtp")
    tokens, _ = served(adapter, SAMPLINGS["greedy"], drafter)
    assert tokens == served(adapter, SAMPLINGS["greedy"])[0]
    assert drafter.weight_bytes > 0


def _with_module(source: Path, directory: Path) -> Path:
    for path in source.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    checkpoint = Checkpoint(source)
    hidden = checkpoint.read("model.norm.weight").shape[0]
    tensors = {
        f"mtp.{name.removeprefix('model.')}": checkpoint.read(name)
        for name in checkpoint.names
        if name.startswith("model.layers.0.")
    }
    tensors |= {f"mtp.{name}.weight": torch.ones(hidden) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    tensors |= {"mtp.norm.weight": torch.ones(hidden), "mtp.fc.weight": torch.eye(hidden).repeat(1, 2)}
    save_file(tensors, directory / "mtp.safetensors")
    index = directory / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    written["weight_map"].update(dict.fromkeys(tensors, "mtp.safetensors"))
    index.write_text(json.dumps(written))
    return directory


@pytest.mark.parametrize(
    ("speculation", "message", "field"),
    [
        ({"method": "draft", "model": "/nowhere"}, "is '/nowhere', which is not a directory", "speculation.model"),
        (
            {"method": "draft", "model": "llama"},
            "whose tokenizer has other tokens than the model's",
            "speculation.model",
        ),
        (
            {"method": "eagle", "model": "llama"},
            "no tensor 'fc.weight', so this is not an EAGLE head",
            "speculation.model",
        ),
        ({"method": "medusa", "model": "llama"}, "no Medusa heads in the checkpoint", "speculation.model"),
        ({"method": "mtp"}, "has no multi-token-prediction module", "speculation.method"),
    ],
)
def test_what_cannot_be_loaded_is_named(checkpoints, speculation, message, field):
    given = dict(speculation)
    if given.get("model") == "llama":
        given["model"] = str(checkpoints / "llama")
    adapter = LLM(context(checkpoints / "qwen3"))
    with pytest.raises(ConfigError, match=message) as caught:
        load_drafter(stage(**given), adapter, context(checkpoints / "qwen3"))
    assert caught.value.field == f"stages.llm.{field}"
    assert caught.value.message.startswith("stage 'llm': speculation: ")


def test_sizes_are_compared_where_there_are_no_tokenizers(checkpoints, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for path in (checkpoints / "qwen3").iterdir():
            if path.name != "tokenizer.json":
                (tmp_path / name / path.name).write_bytes(path.read_bytes())
    adapter = LLM(context(checkpoints / "qwen3"))
    assert load_drafter(stage(method="draft", model=str(tmp_path / "two")), adapter, context(tmp_path / "one"))
    adapter.vocab_size += 1
    with pytest.raises(ConfigError, match=r"has 672 tokens; the model has 673"):
        load_drafter(stage(method="draft", model=str(tmp_path / "two")), adapter, context(tmp_path / "one"))


def test_models_that_keep_a_state_copy_what_was_there(checkpoints):
    adapter = LLM(context(checkpoints / "qwen3"))
    adapter.kv = replace(adapter.kv, states=StateLayout((), continues=True))
    assert load_drafter(stage(method="ngram"), adapter, context(checkpoints / "qwen3"))
    with pytest.raises(ConfigError, match="is 'mtp'; for a model whose layers keep a state per sequence it must be ng"):
        load_drafter(stage(method="mtp"), adapter, context(checkpoints / "qwen3"))


def test_driven_stages_have_no_drafter(checkpoints):
    adapter = LLM(context(checkpoints / "qwen3"))
    adapter.conditioned = True
    assert load_drafter(stage(method="mtp"), adapter, context(checkpoints / "qwen3")) is None
