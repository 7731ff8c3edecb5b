"""What runs for a request: exactly the stages it needs, in an order that can be run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.graph.stage_graph import INPUT, OUTPUT, StageGraph, Walk
from segue.messages.errors import InvalidRequest
from segue.messages.formats import Format
from segue.messages.request import MediaPart, Message, Request

KINDS = ("image", "audio", "video")


def ask(*modalities: str, media: tuple[str, ...] = (), voice: str | None = None) -> Request:
    parts = [MediaPart(kind=kind, data=b"") for kind in media]
    message = Message(role="user", content=list(parts))
    return Request(request_id="r", messages=[message], modalities=list(modalities), voice=voice)


def heard(walk: Walk) -> list[str]:
    """The stages that the client hears from."""
    return [name for name, stage in walk.items() if stage.to_client]


def test_text_never_touches_the_talker(graph: StageGraph) -> None:
    walk = graph.walk(ask("text"))
    assert [*walk] == [INPUT, "thinker"]
    assert walk["thinker"].to_client == {"text"}
    assert walk["thinker"].downstreams == frozenset()
    assert heard(walk) == ["thinker"]


def test_audio_needs_the_thinker_but_does_not_hear_it(graph: StageGraph) -> None:
    walk = graph.walk(ask("audio", media=("image",)))
    assert [*walk] == [INPUT, "encoder", "thinker", "talker", "vocoder"]
    assert walk["thinker"].to_client == frozenset()
    assert walk["vocoder"].to_client == {"audio"}
    assert {name: stage.upstreams for name, stage in walk.items()} == {
        INPUT: set(),
        "encoder": {INPUT},
        "thinker": {INPUT, "encoder"},
        "talker": {"thinker"},
        "vocoder": {"talker"},
    }


def test_tokens_come_from_the_input_stage_alone(graph: StageGraph) -> None:
    walk = graph.walk(ask("tokens", media=("image",)))
    assert [*walk] == [INPUT]
    assert walk[INPUT].to_client == {"tokens"}
    assert "tokens" not in graph.gives
    both = graph.walk(ask("tokens", "text"))
    assert [*both] == [INPUT, "thinker"]
    assert heard(both) == [INPUT, "thinker"]


def test_both(graph: StageGraph) -> None:
    walk = graph.walk(ask("text", "audio"))
    assert "encoder" not in walk
    assert heard(walk) == ["thinker", "vocoder"]


def test_a_file_is_made_by_the_output_stage(graph: StageGraph) -> None:
    request = ask("text", "audio")
    request.formats = {"audio": Format(name="mp3")}
    walk = graph.walk(request)
    assert [*walk] == [INPUT, "thinker", "talker", "vocoder", OUTPUT]
    assert heard(walk) == ["thinker", OUTPUT], "text does not pass through it"
    assert (walk["vocoder"].encoded, walk["vocoder"].downstreams) == ({"audio"}, {OUTPUT})
    assert (walk[OUTPUT].to_client, walk[OUTPUT].upstreams) == ({"audio"}, {"vocoder"})


def test_a_false_condition_is_no_edge() -> None:
    graph = StageGraph("m")
    graph.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    graph.stage("voice", "module")
    graph.stage("speaker", "module", gives={"audio"})
    graph.edge("thinker", "speaker")
    graph.edge("thinker", "voice", when=lambda request: request.voice is not None)
    graph.edge("voice", "speaker")
    assert [*graph.walk(ask("audio"))] == [INPUT, "thinker", "speaker"]
    with_voice = graph.walk(ask("audio", voice="x"))
    assert [*with_voice] == [INPUT, "thinker", "voice", "speaker"]
    assert with_voice["speaker"].upstreams == {"thinker", "voice"}


def test_one_of_two_ways_to_an_output() -> None:
    graph = StageGraph("m")
    graph.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    for name, loud in (("loud", True), ("soft", False)):
        graph.stage(name, "module", gives={"audio"})
        graph.edge("thinker", name, when=lambda request, loud=loud: (request.voice == "loud") is loud)
    assert [*graph.walk(ask("audio", voice="loud"))] == [INPUT, "thinker", "loud"]
    assert [*graph.walk(ask("audio"))] == [INPUT, "thinker", "soft"]


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (ask("text", "image"), "modalities", "modalities has 'image'; this model gives audio, text$"),
        (ask("adio"), "modalities", "this model gives audio, text; did you mean 'audio'"),
        (ask(), "modalities", "modalities is empty; this model gives audio, text"),
    ],
)
def test_wrong_modalities(graph: StageGraph, request_: Request, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        graph.walk(request_)
    assert caught.value.field == field


def test_media_that_no_stage_takes() -> None:
    graph = StageGraph("m")
    graph.stage("thinker", "autoregressive", takes={"text", "image"}, gives={"text"})
    assert [*graph.walk(ask("text", media=("image",)))] == [INPUT, "thinker"]
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[1\] is video; this model takes image, text"):
        graph.walk(ask("text", media=("image", "video")))
    part = MediaPart(kind="audio", data=b"", field="messages[3].content[0].input_audio")
    request = Request(request_id="r", messages=[Message(role="user", content=[part])])
    with pytest.raises(InvalidRequest, match="is audio") as caught:
        graph.walk(request)
    assert caught.value.field == "messages[3].content[0].input_audio"


def test_an_output_without_its_media() -> None:
    graph = StageGraph("m")
    graph.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    graph.stage("encoder", "module", takes={"image"})
    graph.stage("editor", "diffusion", gives={"image"})
    graph.edge("encoder", "editor")
    assert [*graph.walk(ask("image", media=("image",)))] == [INPUT, "encoder", "editor"]
    with pytest.raises(InvalidRequest, match=r"has 'image', which .* alone; it may need image") as caught:
        graph.walk(ask("image"))
    assert caught.value.field == "modalities"


def test_an_output_behind_a_false_condition() -> None:
    graph = StageGraph("m")
    graph.stage("thinker", "autoregressive", takes={"text"}, gives={"text"})
    graph.stage("speaker", "module", gives={"audio"})
    graph.edge("thinker", "speaker", when=lambda request: request.voice is not None)
    with pytest.raises(InvalidRequest, match=r"cannot make from this request alone$"):
        graph.walk(ask("audio"))


@st.composite
def graphs(draw: st.DrawFn) -> StageGraph:
    """Any valid graph: stages in some order of declaration, edges from earlier to later ones of another order."""
    count = draw(st.integers(1, 7))
    order = [f"s{number}" for number in range(count)]
    takes = [draw(st.sets(st.sampled_from(("text", *KINDS)))) for _ in order]
    gives = [draw(st.sets(st.sampled_from(("text", "audio")))) for _ in order]
    pairs = [(a, b) for b in range(count) for a in range(b) if draw(st.booleans())]
    for number in range(count):  # what has no input takes text; what leads nowhere gives audio
        if not takes[number] and not any(b == number for _, b in pairs):
            takes[number] = {"text"}
    for number in reversed(range(count)):
        if not gives[number] and not any(a == number for a, _ in pairs):
            gives[number] = {"audio"}
    graph = StageGraph("random")
    main = draw(st.sampled_from([number for number in range(count) if gives[number]]))
    for number in draw(st.permutations(range(count))):
        graph.stage(order[number], "module", takes=takes[number], gives=gives[number], main=number == main)
    for a, b in draw(st.permutations(pairs)):
        truth = draw(st.sampled_from((None, True, False)))
        graph.edge(order[a], order[b], when=None if truth is None else lambda request, truth=truth: truth)
    return graph


def can_run(graph: StageGraph, request: Request, name: str) -> bool:
    """By definition, not by the walk's own way: recursion up the edges."""
    stage = graph.stages[name]
    if name == INPUT:
        return True
    if stage.media_only and not stage.takes & request.media_kinds():
        return False
    return any(
        edge.target == name and (edge.when is None or edge.when(request)) and can_run(graph, request, edge.source)
        for edge in graph.edges
    )


def is_needed(graph: StageGraph, request: Request, name: str) -> bool:
    if not can_run(graph, request, name):
        return False
    if graph.stages[name].gives & set(request.modalities):
        return True
    return any(
        edge.source == name and (edge.when is None or edge.when(request)) and is_needed(graph, request, edge.target)
        for edge in graph.edges
    )


@given(data=st.data())
def test_a_walk_is_what_the_request_needs(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    graph.validate()
    media = data.draw(st.sets(st.sampled_from(KINDS)))
    wanted = data.draw(st.sets(st.sampled_from(("text", "audio")), min_size=1))
    request = ask(*wanted, media=tuple(media))
    able = {m for name in graph.stages if can_run(graph, request, name) for m in graph.stages[name].gives}
    try:
        walk: Walk = graph.walk(request)
    except InvalidRequest:
        assert wanted - able or media - graph.takes
        return
    assert wanted <= able
    assert media <= graph.takes
    assert set(walk) == {name for name in graph.stages if is_needed(graph, request, name)}
    assert {m for stage in walk.values() for m in stage.to_client} == wanted
    seen: set[str] = set()
    for name, stage in walk.items():
        assert stage.upstreams <= seen, "every upstream stands earlier in the walk"
        assert all(name in walk[other].downstreams for other in stage.upstreams)
        assert all(name in walk[other].upstreams for other in stage.downstreams)
        assert stage.downstreams or stage.to_client
        seen.add(name)
    assert next(iter(walk)) == INPUT


@given(graphs())
def test_the_order_of_all_stages(graph: StageGraph) -> None:
    order = graph.topological()
    assert sorted(order) == sorted(graph.stages)
    assert all(order.index(edge.source) < order.index(edge.target) for edge in graph.edges)
