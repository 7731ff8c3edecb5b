"""Families that no test of theirs was written for: the same replies as `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from multimodal_family import SOUNDS, TEXT, Case, Run, Stages, answer, beside, goes_on, processed
from multimodal_more import MORE
from multimodal_newer import NEWER
from multimodal_newest import NEWEST
from multimodal_others import OTHERS, make, with_needs
from multimodal_sounds import AUDIO
from multimodal_states import STATES

from segue.messages.errors import ConfigError

IMAGES = (
    TEXT,
    Case("picture", "what is this", (("image", 1),)),
    Case("images", "how do these differ", (("image", 2), ("image", 3), ("image", 4))),
)
DAILY = (
    "glm46v",
    "glmasr",
    "internvl",
    "lfm2_vl",
    "qwen2_vl",
    "qwen3_5_moe",
)
"""Of ways in which media become rows, and of kinds of decoders."""
CLIP = Case("clip", "what happens here", (("video", 5),))
ONE = (*SOUNDS[:2], Case("other", "what was said", (("audio", 2),)))
REFUSED = {
    "kimi_k25": "does not accept video as its processor returns it",
    "qianfan_ocr": "does not accept image as other processors do",
    "got_ocr2": "does not accept image as other processors do",
    "shieldgemma2": "does not accept image as other processors do",
    "pp_chart2table": "names no placeholder for image",
    "ernie4_5_vl_moe": "image and video share a tensor name",
    "granite4_vision": "passes 'deepstack_features' to its decoder along with media",
}
_ALL = {**OTHERS, **AUDIO, **MORE, **NEWER, **NEWEST, **STATES}
SERVED = {kind: made for kind, made in _ALL.items() if kind not in REFUSED}


def cases_of(made: dict[str, Any], kinds: tuple[str, ...]) -> tuple[Case, ...]:
    if kinds == ("audio",):
        return ONE if "one" in made else SOUNDS
    more = {"video": CLIP, "audio": SOUNDS[1]}
    return (*IMAGES, *(case for kind, case in more.items() if kind in kinds))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # GLM-4V's processor, with numpy 2
@pytest.mark.parametrize("kind", with_needs(SERVED, DAILY))
def test_replies_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    made = SERVED[kind]
    make(kind, tmp_path, made)
    stages = Stages(tmp_path)
    cases = cases_of(made, stages.input._processor.kinds)
    asked = made.get("asks", {})
    expected = {case.name: answer(tmp_path, processed(tmp_path, case, **asked)) for case in cases}
    assert len({tuple(reply) for reply in expected.values()}) == len(cases)
    for case in (cases[1], cases[-1]):  # the same question about others
        media = [tuple((medium, seed + other) for medium, seed in case.media) for other in (12, 29, 53)]
        others = (processed(tmp_path, Case(case.name, case.text, these), **asked) for these in media)
        assert any(answer(tmp_path, given) != expected[case.name] for given in others), case.name
    for case in cases[1:]:
        beside(stages.input, case)
        goes_on(stages.input, case)
    run = Run(stages, max_tokens_per_step=19, prefix_states=64)
    assert run(cases) == expected
    assert run(cases) == expected
    assert all(run.cached.values())


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # ERNIE's processor, with numpy 2
@pytest.mark.filterwarnings("ignore:__array_wrap__")  # numpy's, over what a library does with tensors before it fails
@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_what_is_refused_when_it_is_loaded(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path, _ALL[kind])
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        Stages(tmp_path)
