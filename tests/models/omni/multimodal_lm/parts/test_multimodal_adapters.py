"""The language half of models that see, hear or read, with LoRA adapters and with weights quantised while loading."""

from __future__ import annotations

from pathlib import Path

import pytest
from multimodal_family import TOKENS, Run, Stages, answer, cases_of, processed, stage_request

from lora_files import make_adapter, merge
from segue.graph.deployment.options import LoraPlan
from segue.messages.errors import ConfigError, NotFound
from segue.models.omni.multimodal_lm.tiny import presets as tiny
from segue.models.shared.library import AutoModelForMultimodalLM
from selection import daily

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = daily(("qwen2.5-vl", "qwen3-vl", "gemma3-vision", "qwen2-audio", "llava-onevision"), ("qwen3-vl", "qwen2-audio"))
QUANTISED = daily(("qwen2.5-vl", "gemma3-vision", "llama3.2-vision"), ("gemma3-vision", "llama3.2-vision"))


@pytest.mark.parametrize("family", LORA)
def test_an_adapter_is_the_merged_checkpoint(family: str, tmp_path: Path) -> None:
    """In one batch with requests without it and of the same prompts, from whose cached blocks nothing is taken."""
    base, whole = tmp_path / "base", AutoModelForMultimodalLM
    tiny.make(family, base)
    adapter = make_adapter(base, tmp_path / "poet", TARGETS, rank=4, seed=3, of=whole, within="model.language_model")
    merged = merge(base, adapter, tmp_path / "merged", whole)
    cases = cases_of(family)[:3]
    expected = {case.name: answer(base, processed(base, case)) for case in cases} | {
        f"poet {case.name}": answer(merged, processed(merged, case)) for case in cases
    }
    assert all(expected[case.name] != expected[f"poet {case.name}"] for case in cases)
    stages = Stages(base, lora=LoraPlan({"poet": str(adapter)}))
    run = Run(stages, max_tokens_per_step=37)
    assert run(cases, adapters=(None, "poet")) == expected
    assert run(cases, adapters=("poet", None)) == expected
    assert all(run.cached.values()), "its own blocks"
    with pytest.raises(NotFound, match="no LoRA adapter 'poett'; did you mean 'poet'"):
        stages.llm.begin(stage_request("r", adapter="poett"))


@pytest.mark.parametrize("family", QUANTISED)
@pytest.mark.parametrize("quantization", daily(("bfloat16", "int8", "int4", "fp8"), ("bfloat16", "int8")))
def test_quantised_while_loading(family: str, quantization: str, tmp_path: Path) -> None:
    """Smaller, and near: the first tokens of half of the replies at least are those of the exact weights."""
    tiny.make(family, tmp_path)
    cases = cases_of(family)
    exact, small = Stages(tmp_path), Stages(tmp_path, quantization=quantization)
    assert small.llm.weight_bytes < exact.llm.weight_bytes
    run = Run(small)
    replies = run(cases)
    assert run(cases) == replies
    assert {name: run([case])[name] for name, case in zip(replies, cases, strict=True)} == replies, "alone, as together"
    firsts = [replies[name][0] == reply[0] for name, reply in Run(exact)(cases, TOKENS).items()]
    assert 2 * sum(firsts) >= len(firsts)


def test_images_that_are_attended_to_have_no_adapters(tmp_path: Path) -> None:
    tiny.make("llama3.2-vision", tmp_path)
    with pytest.raises(ConfigError, match="takes no LoRA adapters: its layers attend to images") as caught:
        Stages(tmp_path, lora=LoraPlan({}))
    assert caught.value.field == "lora"
