"""Pictures beside a prompt, under the names that pipelines give them, as media parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from segue.media.parts import MediaPolicy, part_of
from segue.messages.request import MediaPart

PICTURES = frozenset({"image", "mask_image", "image_reference", "last_image"})
"""`image` may be a list: several pictures to work on."""


def picture_parts(given: Mapping[str, Any], policy: MediaPolicy) -> list[MediaPart]:
    """The pictures by the names above: PIL images, arrays, paths, URLs or the bytes of files. Blocking (files, HTTP).

    Raises `InvalidRequest` naming the argument.
    """
    parts = []
    for name, value in given.items():
        if value is None:
            continue
        several = name == "image" and isinstance(value, list | tuple)
        for index, source in enumerate(value if several else [value]):
            part = part_of("image", source, policy, f"{name}[{index}]" if several else name)
            parts.append(msgspec.structs.replace(part, role="" if name == "image" else name))
    return parts
