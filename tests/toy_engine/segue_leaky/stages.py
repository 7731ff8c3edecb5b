from __future__ import annotations

from segue_toy.stages import Input, ids_forward

from segue_leaky.worker import LeakyContext


class Sum:
    def __init__(self, ctx: LeakyContext) -> None:
        self._decay = ctx.decay

    def add(self, total: float, number: float) -> float:
        return total * self._decay + number


STAGE_MODELS = {"input": Input, "sum": Sum}
TRANSFERS = {("input", "sum"): ids_forward}
