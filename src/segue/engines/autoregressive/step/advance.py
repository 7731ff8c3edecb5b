"""For models that draw several codes per step (a row): after code 0 is drawn, `YieldsRows.advance` of the stage model
gives the others, in the same step and for all its sequences. Calls are replayed from captured graphs if possible: on a
GPU padded to the sizes that are captured at the start, on a CPU at their own size.

Optional reading: only models that draw rows of codes have an `Advance`, called after code 0 is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np
import torch

from segue.engines.autoregressive.contract import (
    AutoregressiveModel,
    Draws,
    DrawsByHead,
    Recordable,
    SpeaksAtTimes,
    YieldsRows,
)
from segue.engines.autoregressive.sample.draw import Rows, SampledTokens, drawn_before
from segue.engines.autoregressive.sample.sampler import RowSampler
from segue.engines.autoregressive.step.decode_graphs import batch_sizes
from segue.kernels.graphs.replay import USES, NetworkGraphs, Replayer, replayer_on
from segue.kernels.staging import upload, upload_all
from segue.parallel.ranks import ALONE, Ranks

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
        self._by_head = isinstance(model, DrawsByHead)
        self._drawn = model.groups if self._by_head else model.groups - 1
        """Codes per row that the stage model gives."""
        self._numbers = model.groups - 1
        self._looks_back = 0
        if isinstance(model, DrawsByHead):
            self._numbers, self._looks_back = model.draws_per_row, model.looks_back
        self._sizes = batch_sizes(most) if padded else list(range(1, most + 1))
        self._padded = padded
        self._graphs: NetworkGraphs | None = None
        if replayer is not None:
            replayer.most = max(replayer.most, len(self._sizes))
            self._graphs = NetworkGraphs(self._run, device, replayer)

    def recent(self, wanted: Rows, before: SampledTokens | None) -> torch.Tensor | None:
        """[n, looks_back, groups] long: the rows before the one that each sequence draws, as in `Draws`; None if
        the stage model does not read them. `before`: what the step in flight draws, not known on the host."""
        if not self._by_head:
            return None
        rows = np.full((len(wanted), self._looks_back, self.groups), -1, dtype=np.int64)
        coming: list[tuple[int, int]] = []
        for index, sequence in enumerate(wanted):
            generated = drawn_before(sequence)
            known = sequence.codes[:generated]
            missing = generated - len(known)
            end = self._looks_back - missing
            known = known[-end:] if end else []
            if known:
                rows[index, end - len(known) : end] = known
            if missing:
                assert before is not None, "a row before the last is not known"
                coming.append((index, before.places[sequence]))
        given = upload(rows, self._device)
        if coming:
            assert before is not None
            assert before.codes is not None
            places = upload(np.array(coming, dtype=np.int64).T, self._device)
            given[places[0], -1] = before.codes.index_select(0, places[1])
        return given

    def rows(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        samplers: Seq[RowSampler],
        generated: Seq[int],
        recent: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of codes [n, groups] long, whether their logits are finite [n] bool).

        `hidden` [n, hidden] and `tokens` [n], code 0 drawn from it; row i has `generated[i]` tokens before this one.
        `recent`: what `recent` gives.
        """
        numbers = np.stack(
            [sampler.draw_codes(at, self._numbers) for sampler, at in zip(samplers, generated, strict=True)]
        )
        greedy = np.array([sampler.temperature == 0.0 for sampler in samplers])
        filters = np.array([(one.temperature, one.top_k, one.top_p) for one in samplers], dtype=np.float64)
        given = [hidden, tokens, *upload_all([numbers, greedy, filters], self._device)]
        if recent is not None:
            given.append(recent)
        if isinstance(self._model, SpeaksAtTimes):
            codes, finite = self._spoken(self._model, given)
        else:
            codes, finite = self._call(given)
        if self._by_head:
            return codes, finite
        return torch.cat([tokens[:, None], codes], dim=1), finite

    def _spoken(self, model: SpeaksAtTimes, given: Seq[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_call`; rows that do not speak get the codes of silence."""
        speaks = model.speaks(given[1])
        if self._padded:
            drawn, finite = self._call(given)
            return torch.where(speaks[:, None], drawn, model.silent), finite | ~speaks
        places = speaks.nonzero()[:, 0]
        codes, finite = model.silent.repeat(len(speaks), 1), torch.ones_like(speaks)
        if len(places):
            codes[places], finite[places] = self._call([tensor[places] for tensor in given])
        return codes, finite

    def _call(self, given: Seq[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """`_run`, replayed if it is captured."""
        count = len(given[0])
        run = self._run if self._graphs is None else self._graphs
        if self._padded:
            size = next((size for size in self._sizes if size >= count), None)
            if size is None:  # the copies of a prompt draw at once, however many: too rare a size to capture
                run = self._run
            else:
                given = [_padded(tensor, size) for tensor in given]
        codes, finite = run(*given)
        return codes[:count], finite[:count]

    @torch.inference_mode()
    def warm_up(self, hidden: torch.Tensor, ranks: Ranks = ALONE) -> None:
        """Run the sizes of steps, and capture them: requests then do not wait for it. `hidden`: final hidden states
        [1, hidden] of any token. `ranks`: all run as many."""
        began = time.monotonic()
        for size in self._sizes:
            numbers = torch.zeros(size, self._numbers, dtype=torch.float64, device=self._device)
            ids, greedy = (torch.zeros(size, dtype=kind, device=self._device) for kind in (torch.long, torch.bool))
            for _ in range(1 if self._graphs is None else USES):
                run = self._run if self._graphs is None else self._graphs
                run(hidden.repeat(size, 1), ids, numbers, greedy, *self._blank(size))
            if not self._padded and ranks.same(lambda: time.monotonic() - began > SECONDS, bool):
                return

    def _blank(self, size: int) -> list[torch.Tensor]:
        """Filters and rows before, of outputs without any."""
        filters = torch.ones(size, 3, dtype=torch.float64, device=self._device)
        if not self._by_head:
            return [filters]
        shape = (size, self._looks_back, self.groups)
        return [filters, torch.full(shape, -1, dtype=torch.long, device=self._device)]

    def _run(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        numbers: torch.Tensor,
        greedy: torch.Tensor,
        filters: torch.Tensor,
        recent: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes [n, groups - 1], or [n, groups] if drawn by head; whether the row's logits are finite [n])."""
        draws = Draws(numbers, greedy, filters, recent=recent)
        codes = self._model.advance(hidden, ids, draws)
        expected = (len(ids), self._drawn)
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
