"""An engine over a stage model, or over one of several ranks."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from segue.engines.autoregressive.config import AutoregressiveConfig
from segue.engines.autoregressive.engine import AutoregressiveEngine


@runtime_checkable
class MakesEngine(Protocol):
    """A stage model of several ranks."""

    def engine(self, config: AutoregressiveConfig, **options: Any) -> Any:
        """Rank 0's engine; the other ranks have made theirs."""


def engine_over(adapter: Any, config: AutoregressiveConfig, **options: Any) -> Any:
    """`options`: of the engine."""
    if isinstance(adapter, MakesEngine):
        return adapter.engine(config, **options)
    return AutoregressiveEngine(adapter, config, **options)
