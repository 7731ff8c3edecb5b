"""An EAGLE-3 head for a stage model, as a checkpoint of its published layout, loaded as a deployment loads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from head_files import eagle_config, layer_shapes, random_tensors, write
from segue.engines.autoregressive.contract import AutoregressiveContext
from segue.engines.autoregressive.speculation.speculation import Speculation
from segue.graph.deployment.deployment import Hardware
from segue.graph.deployment.loader import load_plan
from segue.graph.stage_graph import StageGraph
from segue.worker.kinds.autoregressive.drafters import load_drafter


def eagle_drafts(
    graph: StageGraph,
    context: AutoregressiveContext,
    target: Any,
    directory: Path,
    replies: Iterable[list[int]],
    num_blocks: int,
) -> Speculation:
    """A head over the states of the target's first, middle and last layer. Its weights are random and its vocabulary is
    the commonest token of `replies`, so some of its drafts are right."""
    width = target.embed(torch.zeros(1, dtype=torch.long), None).shape[-1]
    count = len(target.library_decoder.layers)
    [(common, _)] = Counter(token for ids in replies for token in ids).most_common(1)
    shapes = layer_shapes("midlayer.", width, wide=2) | {
        "midlayer.hidden_norm.weight": [width],
        "fc.weight": [width, 3 * width],
        "norm.weight": [width],
        "lm_head.weight": [1, width],
    }
    places = {"eagle_aux_hidden_state_layer_ids": [0, count // 2, count - 1]}
    config = eagle_config(width, target.vocab_size, eagle_config=places, draft_vocab_size=1)
    write(directory, {**random_tensors(shapes), "d2t": torch.tensor([common])}, config)
    wanted = {"method": "eagle", "model": str(directory), "tokens": 3, "adaptive": False}
    plan = load_plan(graph, {"stages": {context.stage: {"speculation": wanted}}}, hardware=Hardware(4, 8 << 30)).stages[
        context.stage
    ]
    drafter = load_drafter(plan, target, context)  # type: ignore[arg-type]
    assert drafter is not None
    return drafter.speculation(plan.speculation, num_blocks)  # type: ignore[attr-defined]
