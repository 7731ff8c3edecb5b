"""What the stage graphs of all diffusion families end with. No torch here."""

from __future__ import annotations

from segue.graph.stage_graph import INPUT, StageGraph


def denoise(g: StageGraph, gives: str) -> None:
    """Add the denoiser, which gets what is asked for (size, steps, guidance) and what every stage declared so far
    makes, and the decoder of what the client gets."""
    encoders = [name for name in g.stages if name != INPUT]
    g.stage("denoiser", "diffusion")
    g.stage("decoder", "module", gives={gives})
    for name in (INPUT, *encoders):
        g.edge(name, "denoiser")
    g.edge("denoiser", "decoder")  # a chunk per picture or clip, and per preview
