"""The stage graph of an encoder-decoder that transcribes audio: two stages. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint."""
    g = StageGraph("speech_seq2seq")
    g.stage("encoder", "module", takes={"audio"}, fuse_with="llm")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, divisible=False)
    g.edge("encoder", "llm")  # one chunk: the encoded window
    return g
