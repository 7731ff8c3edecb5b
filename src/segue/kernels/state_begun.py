"""Several tokens that go on from a state, of modules that take one for a single token alone.

The selective scan of `transformers` (Mamba, Falcon-Mamba, Jamba) begins a text of several tokens with a state of zeros,
as the kernel does that it stands for, also where the module has asked its cache for the state before. All else is the
same: so the state takes the place of these zeros, and the module goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ZEROS = (torch.zeros, torch.zeros_like, torch.Tensor.new_zeros)


class BegunWith(TorchFunctionMode):
    """Within it, the first zeros of the very shape of a state are that state, once for each. Whoever uses it compares
    what comes of it with a text run whole. Every call of torch takes a little longer there: a mixer of Mamba 5%."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        """`states`: what the module has asked its cache for by now; those that are used are taken out. They stay of
        their own dtype, and may be changed in place."""
        super().__init__()
        self._states = states

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._states and func in _ZEROS:
            for place, state in enumerate(self._states):
                if state.shape == made.shape:
                    return self._states.pop(place)
        return made
