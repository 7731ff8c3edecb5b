"""What `segue graph` prints."""

from __future__ import annotations

from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.parts import Outcome
from segue.graph.render import as_mermaid, as_text
from segue.graph.stage_graph import StageGraph
from segue.messages.request import Request


def wants_audio(request: Request) -> bool:
    return "audio" in request.modalities


def small() -> StageGraph:
    graph = StageGraph("small")
    graph.stage("thinker", "autoregressive", takes={"text", "image"}, gives={"text"})
    graph.stage("vocoder", "module", gives={"audio"}, fuse_with="thinker")
    graph.edge("thinker", "vocoder", when=wants_audio)
    return graph


TEXT = """\
small: takes image, text; gives audio, text; main output from thinker

   stage    engine          takes        gives
   input    module          -            -
0  thinker  autoregressive  image, text  text
1  vocoder  module          -            audio
   output   module          -            -

edge                when
input -> thinker    -
thinker -> vocoder  wants_audio
vocoder -> output   WantsFile
"""

PLAN = """\
small: takes image, text; gives audio, text; main output from thinker

   stage    engine          takes        gives  devices  replicas  memory  dtype    threads  batch  worker with
   input    module          -            -      cpu      4         -       float32  1        16     -
0  thinker  autoregressive  image, text  text   cpu      1         34.2%   float32  3        64     vocoder
1  vocoder  module          -            audio  cpu      1         5.7%    float32  3        16     thinker
   output   module          -            -      cpu      1         -       float32  1        16     -

edge                when         connector  kind    budget
input -> thinker    -            shm        shm     64 MiB
thinker -> vocoder  wants_audio  inproc     inproc  64 MiB
vocoder -> output   WantsFile    shm        shm     64 MiB
"""

MERMAID = """\
flowchart LR
    s0["input<br>module"]
    s1["thinker<br>autoregressive<br>takes image, text"]
    s2["vocoder<br>module"]
    s3["output<br>module"]
    s0 --> s1
    s1 -. wants_audio .-> s2
    s2 -. WantsFile .-> s3
    s1 --> s1_text([text])
    s2 --> s2_audio([audio])
"""

FRAMED = """\
flowchart LR
    s0["input<br>module<br>4 on cpu"]
    subgraph w1["one worker"]
        s1["thinker<br>autoregressive<br>takes image, text<br>1 on cpu"]
        s2["vocoder<br>module<br>1 on cpu"]
    end
    s3["output<br>module<br>1 on cpu"]
    s0 --> s1
    s1 -. wants_audio .-> s2
    s2 -. WantsFile .-> s3
    s1 --> s1_text([text])
    s2 --> s2_audio([audio])
"""


def test_a_graph() -> None:
    assert as_text(small()) == TEXT
    assert as_mermaid(small()) == MERMAID


def many_tokens(request: Request, outcome: Outcome) -> bool:
    return len(outcome.token_ids) > 3


def test_a_loop() -> None:
    graph = small()
    graph.stage("tool", "module")
    graph.edge("thinker", "tool", on=many_tokens)
    graph.edge("tool", "thinker", when=wants_audio, most=3)
    rows = ["thinker -> tool     on many_tokens", "tool -> thinker     wants_audio, returns at most 3x"]
    assert "\n".join(rows) in as_text(graph)
    drawn = as_mermaid(graph)
    assert "    s1 -. on many_tokens .-> s3\n" in drawn
    assert "    s3 -. wants_audio, returns at most 3x .-> s1\n" in drawn


def test_a_tensor() -> None:
    graph = small()
    graph.stage("world", "autoregressive", takes={"actions"})
    graph.edge("world", "thinker")
    graph.tensor("actions", dtype="float32", shape=(6, None), tokens=6, most=9)
    graph.validate()
    assert as_text(graph).startswith("small: takes actions, image, text;")
    assert as_text(graph).endswith("\n\ntensor actions: float32 [6, any], 6 tokens, at most 9\n")


def test_a_plan() -> None:
    plan = load_plan(small(), hardware=Hardware(4, 1 << 30))
    assert as_text(plan) == PLAN
    assert as_mermaid(plan) == FRAMED
