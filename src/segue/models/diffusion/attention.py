"""Which backend of the library computes a network's attention."""

from __future__ import annotations

from typing import Any

from segue.models.diffusion.library import attention_backend


def set_attention(network: Any, backend: str) -> None:
    """For this network alone: the library would make it the default of all others in the process, too. Raises what the
    library raises."""
    with attention_backend():  # whatever is the default within it, the one before is afterwards
        network.set_attention_backend(backend)
