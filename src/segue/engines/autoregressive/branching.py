"""What a request's sequence says of several outputs."""

from __future__ import annotations


class Branching:
    """What becomes of a request that gets several outputs, or one of several: `Forks` or a `BeamGroup`."""

    @property
    def foreseeable(self) -> bool:
        """Its sequences go on as they are, whatever tokens a step gives them."""
        return False
