"""The page about graphs of one's own: its code is the example's, its tables are complete, its deployment loads."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import yaml
from markdown_blocks import ROOT, names, of, rows

from segue import ModelGraph
from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.parts import Link
from segue.graph.stage_graph import StageGraph
from segue.models.speech.speech_seq2seq.graph import graph as hearing
from segue.models.text.causal_lm.graph import graph as writing

PAGE = ROOT / "docs" / "own-graph.md"


def test_the_code_is_that_of_the_example() -> None:
    for name in ("assistant", "illustrator"):
        example = (ROOT / "examples" / name / f"{name}.py").read_text()
        assert any(block.body.strip() in example for block in of("python") if f'ModelGraph("{name}")' in block.body)
        assert len(example.splitlines()) <= 60


def test_the_arguments_are_all() -> None:
    listed = [name for row in rows(PAGE, "## Conditions and loops") for name in names(row[0])]
    assert listed == list(inspect.signature(ModelGraph.edge).parameters)[-3:]
    listed = [name for row in rows(PAGE, "## Models") for name in names(row[0])]
    assert listed == list(inspect.signature(ModelGraph.model).parameters)[1:]
    text = PAGE.read_text()
    for method in (ModelGraph.edge, ModelGraph.reuse):
        shown = text.partition(f"`graph.{method.__name__}(")[2].partition(")`")[0]
        assert all(name in shown for name in list(inspect.signature(method).parameters)[1:])


def test_one_model_is_at_two_places(tmp_path: Path) -> None:
    for name, config in {
        "whisper": {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True,
                    "num_mel_bins": 80, "max_source_positions": 1500},
        "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
        "pocket-tts": {"architectures": ["CsmForConditionalGeneration"]},  # Pocket TTS needs a newer library to be read
    }.items():  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "whisper" / "generation_config.json").write_text('{"no_timestamps_token_id": 3}')
    assistant = ModelGraph("assistant")
    assistant.model("hear", tmp_path / "whisper")
    assistant.model("think", tmp_path / "qwen3")
    assistant.edge("hear", "think")
    [block] = [block for block in of("python") if block.page == PAGE and ".reuse(" in block.body]
    exec(block.body, {"assistant": assistant, "CHECKPOINTS": tmp_path, "aloud": aloud})
    models = assistant.read()
    assert models.places == {"hear": "hear", "think": "think", "speak": "speak", "repeat": "speak"}
    assert models.givers == {"text": "think", "audio": "speak"}


def aloud(sentence: str) -> str:
    return sentence


def test_the_deployment_loads() -> None:
    speaking = StageGraph("speech")  # as that of Pocket TTS, which needs a newer library to be read
    speaking.stage("backbone", "autoregressive", takes={"text"})
    speaking.stage("vocoder", "module", gives={"audio"})
    speaking.edge("backbone", "vocoder")
    members = {"hear": hearing({}), "think": writing({}), "speak": speaking}
    links = [Link("hear", "think", "text"), Link("think", "speak", "text")]
    graph = StageGraph.joined("assistant", members, links, "think")
    [block] = [block for block in of("") if block.page == PAGE and block.body.startswith("stages:")]
    plan = load_plan(graph, yaml.safe_load(block.body), hardware=Hardware(cpus=4, memory_bytes=16 << 30))
    assert plan.stages["think.llm"].max_batch == 16
    assert plan.stages["hear.llm"].dtype == "bfloat16"
    assert plan.stages["speak.vocoder"].threads == 2
