"""The page about graphs of one's own: its code is the example's, its tables are complete, its deployment loads."""

from __future__ import annotations

import inspect

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
    shown = next(block for block in of("python") if block.page == PAGE)
    example = (ROOT / "examples" / "assistant" / "assistant.py").read_text()
    assert shown.body.strip() in example
    assert len(example.splitlines()) <= 60


def test_the_arguments_are_all() -> None:
    listed = [name for row in rows(PAGE, "## Models") for name in names(row[0])]
    assert listed == list(inspect.signature(ModelGraph.model).parameters)[1:]
    text = PAGE.read_text()
    for method in (ModelGraph.edge, ModelGraph.reuse):
        shown = text.partition(f"`graph.{method.__name__}(")[2].partition(")`")[0]
        assert all(name in shown for name in list(inspect.signature(method).parameters)[1:])


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
