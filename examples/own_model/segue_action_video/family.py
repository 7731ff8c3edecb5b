"""Describes the model to Segue's registry, without importing torch."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import StageGraph
from segue.models.family import Family


def graph(config: dict[str, Any]) -> StageGraph:
    """Images and actions → the trunk draws codes → frames."""
    g = StageGraph("action_video")
    per_frame, most = config["actions_per_frame"], config["max_frames"] - 1
    g.tensor("actions", dtype="float32", shape=(per_frame, config["action_size"]), tokens=per_frame, most=most)
    g.stage("trunk", "autoregressive", takes={"image", "actions"}, tensors=[""])
    g.stage("frames", "module", gives={"image", "video"}, tensors=["image_tokenizer."])
    g.edge("trunk", "frames")
    return g


FAMILY = Family(
    name="action_video",
    architectures=frozenset({"ActionVideoForGeneration"}),
    graph=graph,
    stages_module="segue_action_video.stages",
    chats=lambda model_dir: False,
    appends=True,
    goes_on=True,
    stage_keys=frozenset({"quantization"}),
)
