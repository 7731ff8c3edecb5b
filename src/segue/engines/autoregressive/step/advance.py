"""Completes rows of codes: after code 0 is drawn, `YieldsRows.advance` gives the other codes, in the same step and for
all its sequences. Calls are replayed from captured graphs if possible: on a GPU padded to the sizes that are captured
at the start, on a CPU at their own size."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np
import torch

from segue.engines.autoregressive.contract import AutoregressiveModel, Draws, Recordable, YieldsRows
from segue.engines.autoregressive.sample.sampler import RowSampler
from segue.engines.autoregressive.step.decode_graphs import batch_sizes
from segue.kernels.graphs.replay import USES, NetworkGraphs, Replayer, replayer_on
from segue.kernels.staging import upload_all

SECONDS = 2.0
"""On a CPU, no further size is run at the start after this time."""


class Advance:
    """Runs a stage model's `advance`."""

    def __init__(
        self,
        model: YieldsRows,
        device: torch.device,
        most: int,
        replayer: Replayer | None = None,
        *,
        padded: bool = False,
    ) -> None:
        """`most`: sequences of a step. `replayer`: captures the calls; None: none is captured. `padded`: a call runs at
        the next larger of a few sizes."""
        self._model = model
        self._device = device
        self.groups = model.groups
        self._sizes = batch_sizes(most) if padded else list(range(1, most + 1))
        self._padded = padded
        self._graphs: NetworkGraphs | None = None
        if replayer is not None:
            replayer.most = max(replayer.most, len(self._sizes))
            self._graphs = NetworkGraphs(self._run, device, replayer)

    def rows(
        self, hidden: torch.Tensor, tokens: torch.Tensor, samplers: Seq[RowSampler], generated: Seq[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of codes [n, groups] long, whether their logits are finite [n] bool).

        `hidden` [n, hidden] and `tokens` [n], code 0 drawn from it; row i has `generated[i]` tokens before this one.
        """
        others = self.groups - 1
        numbers = np.stack([sampler.draw_codes(at, others) for sampler, at in zip(samplers, generated, strict=True)])
        temperature = np.array([sampler.temperature for sampler in samplers], dtype=np.float64)
        given = [hidden, tokens, *upload_all([numbers, temperature == 0.0, temperature], self._device)]
        count = len(tokens)
        run = self._run if self._graphs is None else self._graphs
        if self._padded:
            size = next((size for size in self._sizes if size >= count), None)
            if size is None:  # the copies of a prompt draw at once, however many: too rare a size to capture
                run = self._run
            else:
                given = [_padded(tensor, size) for tensor in given]
        codes, finite = run(*given)
        return torch.cat([tokens[:, None], codes[:count]], dim=1), finite[:count]

    @torch.inference_mode()
    def warm_up(self, hidden: torch.Tensor) -> None:
        """Run the sizes of steps, and capture them: requests then do not wait for it. `hidden`: final hidden states
        [1, hidden] of any token."""
        began = time.monotonic()
        for size in self._sizes:
            numbers = torch.zeros(size, self.groups - 1, dtype=torch.float64, device=self._device)
            kinds = (torch.long, torch.bool, torch.float64)
            ids, greedy, temperature = (torch.zeros(size, dtype=kind, device=self._device) for kind in kinds)
            for _ in range(1 if self._graphs is None else USES):
                (self._run if self._graphs is None else self._graphs)(
                    hidden.repeat(size, 1), ids, numbers, greedy, temperature
                )
            if not self._padded and time.monotonic() - began > SECONDS:
                return

    def _run(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        numbers: torch.Tensor,
        greedy: torch.Tensor,
        temperature: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes 1 to groups - 1 [n, groups - 1], whether the row's logits are finite [n])."""
        draws = Draws(numbers, greedy, temperature)
        codes = self._model.advance(hidden, ids, draws)
        expected = (len(ids), self.groups - 1)
        assert codes.shape == expected, f"advance gave codes of shape {tuple(codes.shape)}, not {expected}"
        return codes, torch.ones_like(greedy) if draws.finite is None else draws.finite


def advance_of(model: AutoregressiveModel, most: int, *, eager: bool) -> Advance | None:
    """None for a stage model that yields single ids. `eager`: capture nothing."""
    if not isinstance(model, YieldsRows):
        return None
    on_gpu = model.device.type == "cuda"
    recordable = on_gpu or (isinstance(model, Recordable) and model.recordable)
    replayer = replayer_on(model.device) if recordable and not eager else None
    padded = replayer is not None and on_gpu  # rows cost little time there, graphs memory
    return Advance(model, model.device, most, replayer, padded=padded)


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with zeros behind its rows."""
    if len(tensor) == rows:
        return tensor
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded
