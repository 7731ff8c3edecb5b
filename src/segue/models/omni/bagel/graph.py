"""The stage graph of BAGEL; read this first. No torch here."""

from __future__ import annotations

from typing import Any

from segue.graph.parts import Outcome
from segue.graph.stage_graph import INPUT, StageGraph
from segue.messages.request import Request

INTERLEAVE = "interleave"
"""Option of a request: the number of images in a reply of texts and images by turns."""
MOST_IMAGES = 16
"""Of such a reply."""


def draws(request: Request) -> bool:
    """Whether the client wants an image."""
    return "image" in request.modalities


def interleaved(request: Request) -> bool:
    """Whether the reply is a text, an image, a text, and so on."""
    return draws(request) and INTERLEAVE in request.options


def an_image_follows(request: Request, written: Outcome) -> bool:
    """Whether the reply has an image after the text that was written; always, unless it has texts and images by turns,
    which end with a text."""
    return not interleaved(request) or written.visit < request.options[INTERLEAVE]


def graph(config: dict[str, Any]) -> StageGraph:
    """The same graph for every checkpoint. `llm` reads everything; it writes texts, and lends what it has read to the
    denoiser, which has the same decoder. Where texts and images alternate, it is visited again for each text, and reads
    the images as it reads those of a request."""
    g = StageGraph("bagel")
    g.stage("encoder", "module", takes={"image"}, fuse_with="llm")
    g.stage("vae_encoder", "module", takes={"image"}, fuse_with="decoder")
    g.stage("llm", "autoregressive", takes={"text"}, gives={"text"}, without={"lora", "speculation"})
    g.stage("denoiser", "diffusion", shares_with="llm", without=_OF_A_NETWORK)
    g.stage("decoder", "module", gives={"image"})
    g.edge(INPUT, "vae_encoder", when=draws)  # images are edited
    g.edge("encoder", "llm")  # a chunk per image
    g.edge("vae_encoder", "llm")
    g.edge("llm", "denoiser", on=an_image_follows)  # where the contexts are; size, steps, guidance
    g.edge("denoiser", "decoder")  # a chunk per image, and per preview
    for again, first in (("drawn_encoder", "encoder"), ("drawn_vae_encoder", "vae_encoder")):
        g.stage(again, "module", shares_with=first)
        g.edge("decoder", again, when=interleaved)
        g.edge(again, "llm", when=interleaved, most=MOST_IMAGES)
    return g


_OF_A_NETWORK = {
    *("attention", "enforce_eager", "compile", "quantization", "gguf", "offload", "lora"),
    *("tensor_parallel", "cfg_parallel", "sequence_parallel", "sequence_mode"),
}
"""Keys of a denoiser with a network of its own."""
