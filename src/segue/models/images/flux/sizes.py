"""Output sizes of Kontext, and the sizes to which it resizes input images."""

from __future__ import annotations

AREA = 1024**2
TRAINED = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
    (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688),
    (1568, 672),
)  # fmt: skip
"""(width, height) that the published network was trained with, from the library's pipeline."""


def adjusted(height: int, width: int, area: int | None, multiple: int) -> tuple[int, int]:
    """A size of about `area` pixels (1024 x 1024) with the requested aspect ratio: (height, width)."""
    area, aspect = area or AREA, width / height
    fits = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
    return fits[0] // multiple * multiple, fits[1] // multiple * multiple


def preferred(height: int, width: int, multiple: int) -> tuple[int, int]:
    """The trained size with the nearest aspect ratio to an image's: (height, width)."""
    aspect = width / height
    _, best_width, best_height = min((abs(aspect - wide / high), wide, high) for wide, high in TRAINED)
    return best_height // multiple * multiple, best_width // multiple * multiple
