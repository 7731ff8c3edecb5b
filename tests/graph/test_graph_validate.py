"""Every mistake in a graph stops with an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from segue.graph.parts import Outcome
from segue.graph.stage_graph import INPUT, StageGraph
from segue.messages.errors import ConfigError
from segue.messages.request import Request


def base() -> StageGraph:
    graph = StageGraph("m")
    graph.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    return graph


def cycle(g: StageGraph) -> None:
    g.stage("talker", "autoregressive")
    g.stage("vocoder", "module", gives={"audio"})
    g.edge("thinker", "talker")
    g.edge("talker", "vocoder")
    g.edge("vocoder", "talker")


def draw(g: StageGraph) -> None:
    g.stage("draw", "diffusion")
    g.stage("see", "module")
    g.edge("thinker", "draw", on=ended)
    g.edge("draw", "see")


def two_heads(g: StageGraph) -> None:
    draw(g)
    g.edge("see", "thinker", most=2)
    g.edge("see", "draw", most=2)


def no_loop(g: StageGraph) -> None:
    draw(g)
    g.edge("thinker", "see", most=2)


def from_outside(g: StageGraph) -> None:
    draw(g)
    g.edge(INPUT, "draw")
    g.edge("see", "thinker", most=2)


def bound(most: Any) -> Callable[[StageGraph], None]:
    def declare(g: StageGraph) -> None:
        draw(g)
        g.edge("see", "thinker", most=most)

    return declare


def ended(request: Request, outcome: Outcome) -> bool:
    return outcome.finish_reason == "stop"


def unknown_target(g: StageGraph) -> None:
    g.edge("thinker", "talkr")
    g.stage("talker", "autoregressive", gives={"audio"})


def same_name(g: StageGraph) -> None:
    g.stage("thinker", "module")


def called_input(g: StageGraph) -> None:
    g.stage("input", "module")


def same_edge(g: StageGraph) -> None:
    g.stage("talker", "autoregressive", gives={"audio"})
    g.edge("thinker", "talker")
    g.edge("thinker", "talker", when=bool)


def without_input(g: StageGraph) -> None:
    g.stage("orphan", "module")
    g.stage("below", "module", gives={"audio"})
    g.edge("orphan", "below")


def alone(g: StageGraph) -> None:
    g.stage("orphan", "module", gives={"audio"})


def dead_end(g: StageGraph) -> None:
    g.stage("talker", "autoregressive")
    g.stage("vocoder", "module")
    g.edge("thinker", "talker")
    g.edge("talker", "vocoder")


def two_mains(g: StageGraph) -> None:
    g.stage("a", "module", takes={"text"}, gives={"image"}, main=True)
    g.stage("b", "module", takes={"text"}, gives={"image"}, main=True)


def two_texts(g: StageGraph) -> None:
    g.stage("other", "autoregressive", takes={"text"}, gives={"text"})


def silent_main(g: StageGraph) -> None:
    g.stage("other", "autoregressive", takes={"text"}, main=True)
    g.edge("other", "thinker")


def tensor(name: str = "actions", **changes: Any) -> Callable[[StageGraph], None]:
    def declare(g: StageGraph) -> None:
        g.stage("world", "autoregressive", takes={"actions"})
        g.edge("world", "thinker")
        g.tensor(name, **{"dtype": "float32", "shape": (6, None), "tokens": 6, "most": 9, **changes})

    return declare


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (cycle, "graph 'm' has a cycle: talker -> vocoder -> talker"),
        (cycle, "talker; it must be a DAG, but for edges that return: say with most= how often a request may"),
        (
            two_heads,
            "edge 'see' -> 'draw' returns to 'draw', but 'see' -> 'thinker' to 'thinker'; all loops of a graph",
        ),
        (no_loop, "edge 'thinker' -> 'see' has most=2, but closes no loop: no way leads from 'see' to 'thinker'"),
        (from_outside, "edge 'input' -> 'draw' enters what is visited again after 'thinker'.*; lead it to"),
        (draw, "stage 'see' gives nothing and leads to no stage that does"),
        (bound(0), "edge 'see' -> 'thinker' has most=0; it must be a whole number of at least 1"),
        (bound(True), "edge 'see' -> 'thinker' has most=True; it must be a whole number of at least 1"),
        (unknown_target, "edge 'thinker' -> 'talkr' names no stage 'talkr' of this graph; did you mean 'talker'?"),
        (same_name, "two stages called 'thinker'"),
        (called_input, "it already has a stage 'input' of its own"),
        (same_edge, "edge 'thinker' -> 'talker' is declared twice"),
        (lambda g: g.edge("thinker", "thinker"), "edge 'thinker' -> 'thinker' connects a stage to itself"),
        (lambda g: g.edge("thinker", INPUT), "no edge may lead to 'input'"),
        (without_input, "stage 'orphan' has no input: .*; so 'below' cannot be reached from 'input' either"),
        (alone, "stage 'orphan' has no input: .* so it cannot be reached from 'input'$"),
        (dead_end, "stage 'vocoder' gives nothing and leads to no stage that does"),
        (lambda g: g.stage("talker", "autoregresive"), "has engine 'autoregresive'; did you mean 'autoregressive'?"),
        (lambda g: g.stage("talker", "module", takes={"imgae"}), "takes 'imgae'; did you mean 'image'?"),
        (
            lambda g: g.stage("talker", "module", gives={"speech"}),
            "gives 'speech'; known: audio, classes, embedding, image, score, text, video",
        ),
        (lambda g: g.stage("talker", "module", fuse_with="thinkr"), "fuse_with 'thinkr'; did you mean 'thinker'?"),
        (lambda g: g.stage("talker", "module", fuse_with="talker"), "fuse_with 'talker', itself"),
        (
            lambda g: g.stage("late", "module", takes={"text"}, gives={"audio"}, shares_with="thinker"),
            "stage 'late' has shares_with 'thinker'; name a stage upstream of it: input",
        ),
        (lambda g: g.stage("0", "module"), "stage '0': a name must be a letter, then"),
        (two_mains, "marks 'a', 'b' as main"),
        (two_texts, "any of 'thinker', 'other' could make the main output; mark one with main=True"),
        (tensor("image"), "tensor 'image': a name is a letter, then letters, digits, - and _; each differs from"),
        (tensor("action"), "tensor 'action' is taken by no stage; name it in takes= of one"),
        (tensor(dtype="float"), "tensor 'actions' has dtype 'float'; did you mean 'float32'?"),
        (tensor(shape=(6, 0)), r"tensor 'actions' has shape \(6, 0\); each size is at least 1"),
        (tensor(tokens=5), "tensor 'actions' has 5 tokens; it must be 1, or the size of the first axis"),
        (tensor(most=0), "tensor 'actions' has most=0; it must be at least 1"),
        (lambda g: g.stage("world", "autoregressive", takes={"actions"}), "takes 'actions'; did you mean 'audio'?"),
        (silent_main, "stage 'other' is marked main, but gives nothing"),
    ],
)
def test_mistake(mistake: Callable[[StageGraph], None], message: str) -> None:
    graph = base()
    mistake(graph)
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        graph.validate()


def test_nothing_gives_anything() -> None:
    graph = StageGraph("m")
    graph.stage("thinker", "autoregressive", takes={"text"})
    with pytest.raises(ConfigError, match="no stage gives anything"):
        graph.validate()


def test_using_a_wrong_graph_says_the_same() -> None:
    graph = base()
    cycle(graph)
    for use in (graph.topological, lambda: graph.main, partial(graph.walk, Request(request_id="r"))):
        with pytest.raises(ConfigError, match="cycle"):
            use()


def test_a_change_is_checked_again() -> None:
    graph = base()
    graph.validate()
    graph.edge("thinker", "nobody")
    with pytest.raises(ConfigError, match="names no stage 'nobody'"):
        graph.validate()


def test_reading(graph: StageGraph) -> None:
    assert list(graph.stages) == ["input", "encoder", "thinker", "talker", "vocoder", "output"]
    assert graph.takes == {"text", "image", "audio", "video"}
    assert graph.gives == {"text", "audio"}
    assert graph.outputs == ("thinker", "vocoder")
    assert [edge.source for edge in graph.edges if edge.target == "thinker"] == ["input", "encoder"]
    assert graph.downstreams(INPUT) == ("encoder", "thinker")
    assert graph.topological() == ("input", "encoder", "thinker", "talker", "vocoder", "output")
    assert graph.downstreams("vocoder") == ("output",), "it makes files of what is no text"
    assert graph.main == "thinker"
    assert graph.stages["encoder"].media_only
    assert not graph.stages["thinker"].media_only
    assert not graph.stages["talker"].media_only


def test_main_is_the_only_output_or_the_marked_one() -> None:
    image = StageGraph("image")
    image.stage("denoiser", "diffusion", takes={"text"})
    image.stage("decoder", "module", gives={"image"})
    image.edge("denoiser", "decoder")
    assert image.main == "decoder"
    image.stage("captioner", "autoregressive", gives={"text"})
    image.edge("denoiser", "captioner")
    assert image.main == "captioner"
    image.stage("sound", "module", gives={"audio"}, main=True)
    image.edge("denoiser", "sound")
    assert image.main == "sound"


def test_an_edge_from_the_input_may_be_drawn() -> None:
    graph = base()
    graph.edge(INPUT, "thinker", when=wants_voice)  # takes the place of the one that comes by itself
    graph.stage("talker", "autoregressive", gives={"audio"})
    graph.edge(INPUT, "talker")  # takes no modality, wants the voice
    graph.validate()
    assert [(edge.source, edge.target) for edge in graph.edges] == [
        (INPUT, "thinker"),
        (INPUT, "talker"),
        ("talker", "output"),
    ]
    assert graph.edges[0].condition == "wants_voice"


class Long:
    def __call__(self, request: Request) -> bool:
        return True

    def method(self, request: Request) -> bool:
        return True


def wants_voice(request: Request, *, name: str = "") -> bool:
    return request.voice is not None


@pytest.mark.parametrize(
    ("when", "name"),
    [
        (None, None),
        (wants_voice, "wants_voice"),
        (partial(wants_voice, name="x"), "wants_voice"),
        (lambda request: True, "condition"),
        (Long(), "Long"),
        (Long().method, "method"),
    ],
)
def test_conditions_have_names(when: Callable[[Request], bool] | None, name: str | None) -> None:
    graph = base()
    graph.stage("talker", "autoregressive", gives={"audio"})
    graph.edge("thinker", "talker", when=when)
    [edge] = [edge for edge in graph.edges if edge.source == "thinker"]
    assert edge.condition == name


def test_a_loop() -> None:
    graph = base()
    bound(2)(graph)
    assert graph.topological() == (INPUT, "thinker", "draw", "see")
    assert [edge.condition for edge in graph.edges] == [None, "on ended", None, "returns at most 2x"]
    walk = graph.walk(Request(request_id="r", modalities=["text"]))
    assert [*walk] == [INPUT, "thinker", "draw", "see"], "what leads back to a stage that is needed is needed as well"
    assert walk["thinker"].upstreams == {INPUT}
    assert (walk["thinker"].on, walk["see"].returns) == ({"draw": ended}, {"thinker": 2})
    assert [*graph.up_to("thinker").stages] == [INPUT, "thinker"]


def test_a_loop_that_a_request_does_not_want() -> None:
    graph = base()
    draw(graph)
    graph.edge("see", "thinker", most=2, when=lambda request: request.voice is not None)
    assert [*graph.walk(Request(request_id="r", modalities=["text"]))] == [INPUT, "thinker"]
