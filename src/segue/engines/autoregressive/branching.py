"""What a request's sequence says of several outputs."""

from __future__ import annotations


class Branching:
    """What becomes of a request that gets several outputs, or one of several: `Forks` or a `BeamGroup`."""
