"""Graphs of models: what is read of checkpoints' configs, and which mistake is named how. No model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_graph_transforms as functions
import pytest

from segue import ModelGraph
from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.functions import function_at, name_of
from segue.graph.render import as_mermaid, as_text
from segue.messages.errors import ConfigError
from segue.models.model_graph import read_models

CONFIGS: dict[str, dict[str, Any]] = {
    "llm": {"architectures": ["LlamaForCausalLM"]},
    "speech": {"architectures": ["CsmForConditionalGeneration"]},
    "omni": {"architectures": ["Qwen2_5OmniForConditionalGeneration"]},
    "ear": {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True, "num_mel_bins": 80,
            "max_source_positions": 1500},
}  # fmt: skip
MACHINE = Hardware(cpus=2, memory_bytes=16 << 30)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for name, config in CONFIGS.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
    (directory / "ear" / "generation_config.json").write_text('{"no_timestamps_token_id": 3}')
    return directory


def graph(directory: Path, edges: list[tuple[Any, ...]], models: dict[str, str] | None = None) -> ModelGraph:
    """`edges`: source, target, and perhaps a transform and what it carries."""
    made = ModelGraph("mine")
    for name, kind in (models or {"hear": "ear", "think": "llm", "speak": "speech"}).items():
        made.model(name, directory / kind)
    for source, target, *more in edges:
        made.edge(source, target, **dict(zip(("transform", "carries"), more, strict=False)))
    return made


CHAIN: list[tuple[Any, ...]] = [("hear", "think", functions.upper), ("think", "speak")]


def test_models_stand_side_by_side(directory: Path) -> None:
    models = graph(directory, CHAIN).read()
    assert list(models.members) == ["hear", "think", "speak"]
    assert models.givers == {"audio": "speak", "text": "think"}
    assert models.graph.main == "think.llm"
    assert models.graph.topological()[:3] == ("hear.input", "hear.encoder", "hear.llm")
    assert {link.carries for link in models.graph.links} == {"text"}
    plan = load_plan(models.graph, {"stages": {"think": {"max_batch": 3}, "speak.vocoder": {"threads": 2}}},
                     hardware=MACHINE)  # fmt: skip
    assert plan.stages["think.llm"].max_batch == 3
    assert plan.stages["speak.vocoder"].threads == 2
    assert plan.group_of("hear.llm") == ("hear.encoder", "hear.llm"), "as the family suggests"
    assert plan.stages["hear.input"].replicas > plan.stages["think.input"].replicas == 1, "recordings are decoded"
    assert sum(stage.memory_share for stage in plan.stages.values()) < 0.41, "they share one machine"
    shown = as_text(plan)
    assert f"hear -> think   text     {Path(functions.__file__).resolve()}:upper" in shown
    assert "== text ==>" in as_mermaid(models.graph)


def test_a_part_of_a_model_can_take_part(directory: Path) -> None:
    made = ModelGraph("mine")
    made.model("think", directory / "omni", stage="thinker")
    made.model("speak", directory / "speech")
    made.edge("think", "speak")
    assert [name for name in made.read().graph.stages if name.startswith("think.")] == [
        "think.input", "think.encoder", "think.thinker",
    ]  # fmt: skip


def test_a_file_has_the_graph(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "my_graph.py"
    path.write_text(
        "from segue import ModelGraph\n"
        "def shout(text):\n    return text.upper()\n"
        "mine = ModelGraph('mine')\n"
        f"mine.model('a', {str(directory / 'llm')!r})\n"
        f"mine.model('b', {str(directory / 'llm')!r})\n"
        "mine.edge('a', 'b', transform=shout)\n"
    )
    [link] = read_models(path).graph.links
    assert link.transform == f"{path}:shout"
    assert function_at(link.transform)("sea") == "SEA"
    with pytest.raises(ConfigError, match=r"no function 'whisper'"):
        function_at(f"{path}:whisper")
    (tmp_path / "none.py").write_text("")
    with pytest.raises(ConfigError, match="must have one ModelGraph at the top of the module; it has none"):
        read_models(tmp_path / "none.py")
    with pytest.raises(ConfigError, match="there is no file"):
        read_models(tmp_path / "absent.py")


@pytest.mark.parametrize(
    ("edges", "models", "said"),
    [
        ([], None, "no edge leads to the model 'hear' or from it; add one"),
        ([("hear", "think")], None, "no edge leads to the model 'speak'"),
        ([*CHAIN, ("think", "speek")], None, "names no model 'speek' of this graph; did you mean 'speak'?"),
        ([*CHAIN, ("think", "think")], None, "leads from a model to itself"),
        ([*CHAIN, ("think", "speak")], None, "is declared twice"),
        ([("a", "b"), ("b", "c"), ("c", "a")], dict.fromkeys("abc", "llm"), "has a cycle: a -> b -> c -> a"),
        ([("speak", "think"), ("hear", "think")], None,
         "edge 'speak' -> 'think': nothing can go over it: 'speak' gives 'audio' and 'think' takes 'text'"),
        ([("think", "hear"), ("think", "speak")], None, "'think' gives 'text' and 'hear' takes 'audio'"),
        ([("a", "b")], {"a": "omni", "b": "speech"}, "say which goes over it: carries='audio' or 'text'"),
        ([("hear", "think", None, "audio"), ("think", "speak")], None, "carries 'audio'; it can carry 'text'"),
        ([("hear", "think", None, "txet"), ("think", "speak")], None, "carries 'txet'; it can carry 'text'"),
        ([("hear", "think", None, ""), ("think", "speak")], None, "carries ''; it can carry 'text'"),
        ([("a", "b"), ("a", "c")], dict.fromkeys("abc", "llm"),
         "text could be that of 'b', 'c', and no edge leads from one to the other; mark the one"),
        ([("a", "b")], {"a": "llm", "b": "absent"}, "model 'b': no checkpoint at"),
        ([("a", "b")], {"a": "llm", "b.c": "llm"}, "model 'b.c': a name must be a letter"),
        ([("a", "input")], {"a": "llm", "input": "llm"}, "and not 'input'"),
        ([("hear", "think", lambda text: text), ("think", "speak")], None, "a plain function of (text), defined at"),
        ([("hear", "think", functions.nested()), ("think", "speak")], None, "a plain function of (text)"),
        ([("hear", "think", str), ("think", "speak")], None, "a plain function of (text)"),
        ([("hear", "think", functions.later), ("think", "speak")], None, "does not return its result"),
        ([("hear", "think", functions.one_by_one), ("think", "speak")], None, "does not return its result"),
        ([("hear", "think", functions.of_samples), ("think", "speak")], None, "must be a plain function of (text)"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    directory: Path, edges: list[tuple[Any, ...]], models: dict[str, str] | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        graph(directory, edges, models).read()


def looped(directory: Path, *edges: tuple[str, str, dict[str, Any]]) -> ModelGraph:
    made = ModelGraph("mine")
    for name in ("write", "judge", "speak"):
        made.model(name, directory / ("speech" if name == "speak" else "llm"), main=name == "write")
    made.edge("write", "judge")
    made.edge("write", "speak")
    for source, target, more in edges:
        made.edge(source, target, **more)
    return made


def good(request: Any, outcome: Any) -> bool:
    return True


def test_an_edge_may_return(directory: Path) -> None:
    models = looped(directory, ("judge", "write", {"most": 2, "on": good, "revises": True})).read()
    assert models.givers == {"text": "write", "audio": "speak"}, "that of the model that is marked"
    assert models.graph.takes == {"text"}, "an edge that returns does not feed"
    assert list(models.places) == ["write", "judge", "speak"]
    assert "on good, returns at most 2x, revises" in as_text(models.graph)
    assert "== text, on good, returns at most 2x, revises ==>" in as_mermaid(models.graph)
    assert looped(directory, ("write", "write", {"most": 2})).read().graph.takes == {"text"}


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([("judge", "write", {})], "has a cycle: write -> judge -> write; it must be a DAG, but for edges that return: "
         "say with most= how often a request may take such an edge"),
        ([("judge", "judge", {})], "leads from a model to itself; say with most= how often a request may take it"),
        ([("judge", "write", {"most": 0})], "has most=0; it must be a whole number of at least 1"),
        ([("judge", "write", {"most": None, "revises": True})], "has a cycle"),
        ([("judge", "speak", {"most": 3})], "has most=3, but closes no loop: no way leads from 'speak' to 'judge'"),
        ([("judge", "write", {"most": 3}), ("judge", "judge", {"most": 2})],
         "edge 'judge' -> 'judge' returns to 'judge', but 'judge' -> 'write' to 'write'; all loops of a graph must"),
        ([("judge", "write", {"most": 3}), ("write", "write", {"most": 2, "revises": True})],
         "some of its edges that return have revises=True; all must have it, or none"),
        ([("judge", "speak", {"revises": True})], "has revises=True, but does not return: give it most=, or leave"),
        ([("judge", "write", {"most": 3, "on": "good"})], "has on='good'; it must be a function of (request, outcome)"),
        ([("judge", "write", {"most": 3, "on": functions.later})], "it must be a function of (request, outcome)"),
        ([("judge", "write", {"most": 3, "on": functions.upper})], "too many positional arguments"),
    ],
)  # fmt: skip
def test_mistakes_of_loops_are_named(directory: Path, edges: list[tuple[str, str, dict[str, Any]]], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        looped(directory, *edges).read()


def test_names_collide(directory: Path) -> None:
    made = ModelGraph("mine")
    with pytest.raises(ConfigError, match="has no models; add them"):
        made.read()
    made.model("a", directory / "llm")
    made.model("a", directory / "ear")
    with pytest.raises(ConfigError, match="two models called 'a'; names must differ"):
        made.read()


def test_a_model_at_two_places_is_there_once(directory: Path) -> None:
    made = graph(directory, [*CHAIN, ("think", "sum"), ("sum", "echo", functions.upper)])
    made.reuse("sum", "think")
    made.reuse("echo", "speak", main=True)
    models = made.read()
    assert list(models.members) == ["hear", "think", "speak"]
    assert models.givers == {"audio": "echo", "text": "sum"}
    assert (models.main, models.graph.main) == ("sum", "think.llm"), "that of the text"
    assert models.graph.takes == graph(directory, CHAIN).read().graph.takes
    plan = load_plan(models.graph, {}, hardware=MACHINE)
    assert {name.partition(".")[0] for name in plan.stages} == {"hear", "think", "speak"}
    assert "sum (think) -> echo (speak)  text" in as_text(plan)
    assert len(re.findall("== text ==>", as_mermaid(models.graph))) == 4
    with pytest.raises(ConfigError, match=r"stages has 'echo\.vocoder', but 'echo' reuses the model 'speak'"):
        load_plan(models.graph, {"stages": {"echo.vocoder": {"threads": 2}}}, hardware=MACHINE)


def test_a_place_that_takes_the_request_may_reuse_a_model(directory: Path) -> None:
    made = graph(directory, [("a", "b")], dict.fromkeys("ab", "llm"))
    made.reuse("c", "b")
    made.edge("c", "a")
    assert made.read().graph.takes == {"text"}


def test_mistakes_of_reuse_are_named(directory: Path) -> None:
    made = graph(directory, CHAIN)
    made.reuse("echo", "speek")
    with pytest.raises(ConfigError, match="'echo' reuses 'speek', which is no model of this graph; did you mean 'spea"):
        made.read()
    made = graph(directory, CHAIN)
    made.reuse("hear", "speak")
    with pytest.raises(ConfigError, match="two models called 'hear'; names must differ"):
        made.read()
    made = graph(directory, CHAIN)
    made.reuse("echo", "speak")
    with pytest.raises(ConfigError, match="no edge leads to the model 'echo' or from it; add one"):
        made.read()
    made.edge("echo", "think")
    with pytest.raises(ConfigError, match="edge 'echo' -> 'think': nothing can go over it: 'echo' gives 'audio'"):
        made.read()


def test_the_client_gets_one_of_each_modality(directory: Path) -> None:
    made = graph(
        directory, [*CHAIN, ("think", "shout")], {"hear": "ear", "think": "llm", "speak": "speech", "shout": "speech"}
    )
    with pytest.raises(ConfigError, match="audio could be that of 'speak', 'shout', and no edge leads from one to"):
        made.read()
    made = graph(directory, [("think", "left"), ("think", "right"), ("think", "said")], {"think": "llm"})
    for name in ("left", "right"):
        made.model(name, directory / "llm", main=True)
    made.model("said", directory / "speech", main=True)
    with pytest.raises(ConfigError, match="marks 'left', 'right' as main, which give text; mark one"):
        made.read()


def test_an_unknown_stage_is_named(directory: Path) -> None:
    made = ModelGraph("mine")
    made.model("a", directory / "omni", stage="talker")
    with pytest.raises(ConfigError, match="is to end at stage 'talker', which gives nothing"):
        made.read()


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"speak": {"max_batch": 2}}, "'speak', a model of 'mine' with several stages; name one: speak.encoder"),
        ({"thinc.llm": {}}, "'thinc.llm', which is no stage of 'mine'; did you mean 'think.llm'?"),
        ({"think.llm": {"fuse_with": "hear.llm"}}, "a stage of 'think': a worker has stages of one model"),
    ],
)
def test_mistakes_of_a_deployment_are_named(directory: Path, stages: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_plan(graph(directory, CHAIN).read().graph, {"stages": stages}, hardware=MACHINE)


def test_functions_of_the_running_script_are_refused() -> None:
    def pretended() -> Callable[..., Any]:
        space: dict[str, Any] = {"__name__": "__main__"}
        exec("def f(text):\n    return text\n", space)
        made: Callable[..., Any] = space["f"]
        return made

    with pytest.raises(ConfigError, match="'f' of the script that runs, which no worker can import"):
        name_of(pretended(), "transform", ("text",))
