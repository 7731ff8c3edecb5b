"""Families that no test of theirs was written for: the same replies as `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
from multimodal_family import TEXT, Case, Run, Stages, answer, processed
from multimodal_others import OTHERS, make

CASES = (
    TEXT,
    Case("picture", "what is this", (("image", 1),)),
    Case("pictures", "how do these differ", (("image", 2), ("image", 3), ("image", 4))),
)


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_replies_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path)
    expected = {case.name: answer(tmp_path, processed(tmp_path, case)) for case in CASES}
    assert len({tuple(reply) for reply in expected.values()}) == len(CASES)
    run = Run(Stages(tmp_path), max_tokens_per_step=19)
    assert run(CASES) == expected
    assert run(CASES) == expected
    assert all(run.cached.values())
