"""Models of which more than a row per token reaches the decoder, or some layers do otherwise: Llama 4 (chunks),
Gemma 3n (ids again, rows of its encoders for ids), Gemma 4 (ids again, images that see each other in some layers).
The replies of `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from multimodal_family import SOUNDS, TEXT, Case, Run, Stages, answer, beside, processed
from multimodal_gemma import GEMMA, GEMMA_3N, GEMMA_4_LARGER
from multimodal_llama import LLAMA
from multimodal_others import make, with_needs

from segue.messages.errors import InvalidRequest

pytestmark = pytest.mark.slow

TOKENS = 12
TWO = Case("images", "how do these differ", (("image", 2), ("image", 3)))
MORE = {"video": Case("clip", "what happens here", (("video", 5),)), "audio": SOUNDS[1]}
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, made) for kind, made in {**LLAMA, **GEMMA}.items()},
    "gemma3n": ("gemma3n", GEMMA_3N),
    "gemma4, larger": ("gemma4", GEMMA_4_LARGER),
}


@pytest.mark.parametrize("name", with_needs({name: made for name, (_, made) in WIDE.items()}, ("gemma4", "llama4")))
def test_replies_are_those_of_generate(name: str, tmp_path: Path) -> None:
    kind, made = WIDE[name]
    make(kind, tmp_path, made)
    stages = Stages(tmp_path)
    cases = [TEXT, TWO, *(case for medium, case in MORE.items() if medium in stages.input._processor.kinds)]
    expected = {case.name: answer(tmp_path, processed(tmp_path, case), TOKENS) for case in cases}
    assert len({tuple(reply) for reply in expected.values()}) == len(cases)
    others = (Case(TWO.name, TWO.text, (("image", 2 + by), ("image", 3 + by))) for by in (12, 29, 53, 71, 97, 131))
    assert any(answer(tmp_path, processed(tmp_path, other), TOKENS) != expected[TWO.name] for other in others)
    for case in cases[1:]:
        beside(stages.input, case)
    run = Run(stages, max_tokens_per_step=19)
    assert run(cases, TOKENS) == expected
    assert run([TWO], TOKENS) == {TWO.name: expected[TWO.name]}
    assert run.cached[TWO.name]
    if kind == "gemma3n":
        after_preemption(stages, cases, expected)


def after_preemption(stages: Stages, cases: list[Case], expected: dict[str, list[int]]) -> None:
    """In about as many blocks as their prompts fill, which are 150 tokens in two groups of layers."""
    run = Run(stages, prefix_caching=False, block_size=4, num_blocks=60)
    assert run(cases, TOKENS) == expected
    assert run.engine.stats()["preemptions_total"] > 0


def test_an_image_of_more_tokens_than_a_window_is_refused(tmp_path: Path) -> None:
    unified = GEMMA["gemma4_unified"]
    text = {**unified["config"]["text_config"], "sliding_window": 16}
    make("gemma4_unified", tmp_path, {**unified, "config": {**unified["config"], "text_config": text}})
    run = Run(Stages(tmp_path))
    with pytest.raises(
        InvalidRequest, match=r"\d+ tokens of the prompt form a bidirectional span; this model's sliding windows"
    ):
        run([TWO])
