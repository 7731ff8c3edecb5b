"""The stage graph of BAGEL; read this first. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.stage_graph import INPUT, StageGraph
from segue.messages.request import Request


def draws(request: Request) -> bool:
    """Whether the client wants an image."""
    return "image" in request.modalities


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint. `llm` reads everything; it writes texts, and lends what it has read to the
    denoiser, which has the same decoder."""
    g = StageGraph("bagel")
    g.stage("encoder", "module", takes={"image"}, fuse_with="llm")
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with="decoder")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, without={"lora", "speculation"})
    g.stage("denoiser", "diffusion", shares_with="llm", without=_OF_A_NETWORK)
    g.stage("decoder", "module", gives={"image"})
    g.edge(INPUT, "vae_encoder", when=draws)  # images are edited
    g.edge(INPUT, "denoiser")  # size, steps, guidance
    g.edge("encoder", "llm")  # a chunk per image
    g.edge("vae_encoder", "llm")
    g.edge("llm", "denoiser")  # where the contexts are
    g.edge("denoiser", "decoder")  # a chunk per image, and per preview
    return g


_OF_A_NETWORK = {
    *("attention", "enforce_eager", "compile", "quantization", "gguf", "offload", "lora"),
    *("tensor_parallel", "cfg_parallel", "sequence_parallel", "sequence_mode"),
}
"""Keys of a denoiser with a network of its own."""
