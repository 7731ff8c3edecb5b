"""PaliGemma: all tokens of a prompt with images see each other in both directions, and those generated do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from multimodal_family import Case, Run, Stages, answer, beside, goes_on, processed, request_of, sent
from multimodal_newest import PALIGEMMA, PALIGEMMA_2
from multimodal_others import make

from segue.engines.autoregressive.schedule.decision import Limits
from segue.messages.errors import InvalidRequest
from segue.messages.request import Earlier, Message, Request
from segue.models.omni.multimodal_lm.bidirectional import Sight

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # its processor's
TOKENS = 30
CASES = (
    Case("one", "what is this", (("image", 1),)),
    Case("two", "is it the same place?", (("image", 8), ("image", 10))),
    Case("three", "how do these differ, and what is alike in all of them", (("image", 2), ("image", 3), ("image", 4))),
)


@dataclass
class Made:
    directory: Path
    stages: Stages
    expected: dict[str, list[int]]


@pytest.fixture(scope="module", params=["paligemma", "paligemma 2"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = make(
        "paligemma",
        tmp_path_factory.mktemp("paligemma"),
        PALIGEMMA if request.param == "paligemma" else PALIGEMMA_2,
    )
    return Made(directory, Stages(directory), {case.name: reply(directory, case) for case in CASES})


def reply(directory: Path, case: Case) -> list[int]:
    given = processed(directory, case)
    given.pop("labels")
    assert not given["token_type_ids"].any()  # all of it is the prefix
    return answer(directory, given, TOKENS)


def test_the_prompt_is_the_librarys_and_one_span(made: Made) -> None:
    for case in CASES:
        payload = made.stages.input.process(request_of(case))
        assert torch.equal(payload["token_ids"], processed(made.directory, case)["input_ids"][0])
        rows = [chunk["media"][0] for chunk, _ in made.stages.encoded(payload)]
        prompt = made.stages.llm._prompt(sent("input", "llm", payload), rows)
        assert list(prompt.bidirectional) == [(0, len(payload["token_ids"]))]


def test_the_processor_adds_its_tokens_to_the_clients_ids(made: Made) -> None:
    """A beginning of text after the image, a line break at the end."""
    beside(made.stages.input, CASES[0])
    goes_on(made.stages.input, CASES[0])


def test_it_ends_no_prompt_that_follows_another(made: Made) -> None:
    """The beginning of text belongs to the image; there is no line break."""
    stage, first = made.stages.input, request_of(CASES[0])
    begun = stage.process(first)["token_ids"].tolist()
    image = stage._processor.rows["image"]
    follows = Request(request_id="r", prompt_token_ids=[3, image, 4], messages=[Message("user", [*first.media()])])
    follows.earlier = [Earlier(first, [6, 7])]
    shown = [*[image] * begun.count(image), stage._processor.tokenizer.bos_token_id]
    assert begun[: len(shown)] == shown
    assert stage.process(follows)["token_ids"].tolist() == [*begun, 6, 7, 3, *shown, 4]


def test_replies_are_those_of_generate(made: Made) -> None:
    run = Run(made.stages)
    assert run(CASES, TOKENS) == made.expected
    assert len({tuple(ids) for ids in made.expected.values()}) == len(CASES)
    assert run(CASES, TOKENS) == made.expected
    assert not any(run.cached.values())  # a hit would end inside the span


@pytest.mark.parametrize(("budget", "block_size"), [(1, 4), (19, 16)])
def test_chunks_of_any_size_leave_prompts_whole(made: Made, budget: int, block_size: int) -> None:
    assert Run(made.stages, max_tokens_per_step=budget, block_size=block_size)(CASES, TOKENS) == made.expected


def test_generated_tokens_stay_causal_after_preemption(made: Made) -> None:
    """What was generated is computed again along with the prompt, but is no part of its span."""
    case = CASES[2]
    limits = Limits(4, 4, 24, tuple(made.stages.llm.kv.layout(max_model_len=2048).windows))
    payload = made.stages.input.process(request_of(case))
    length = len(payload["token_ids"])
    blocks = 2 * limits.need(length, length) + 4
    run = Run(made.stages, block_size=4, max_tokens_per_step=24, num_blocks=blocks, prefix_caching=False)
    for name in "ab":
        run.add(name, payload, TOKENS)
    assert run.finish(list("ab")) == dict.fromkeys("ab", made.expected[case.name])
    assert run.engine.stats()["preemptions_total"] > 0


def test_two_replies_to_one_prompt(made: Made) -> None:
    run = Run(made.stages, block_size=4, max_tokens_per_step=10)
    payload = made.stages.input.process(request_of(CASES[1]))
    assert run.two(payload, TOKENS) == dict.fromkeys((0, 1), made.expected["two"])


def test_a_prompt_without_an_image_is_refused(made: Made) -> None:
    """As the library's processor does."""
    payload = made.stages.input.process(Request(request_id="r", prompt="write a few words about the sea"))
    with pytest.raises(InvalidRequest, match=r"has media \(image\); this one has none"):
        made.stages.llm._prompt(sent("input", "llm", payload), [])


def test_under_a_causal_mask_the_reply_is_another(made: Made) -> None:
    spoilt = Stages(made.directory)
    for sight in (Sight(), Sight(frozenset({"image"}))):
        spoilt.llm._sight = sight
        assert Run(spoilt)(CASES, TOKENS) != made.expected


def test_a_prompt_beyond_the_windows_is_refused(made: Made) -> None:
    payload = made.stages.input.process(request_of(Case("long", "and so on " * 40, (("image", 1),))))
    rows = [chunk["media"][0] for chunk, _ in made.stages.encoded(payload)]
    if made.stages.llm._longest_whole == 120:
        with pytest.raises(InvalidRequest, match="sliding windows allow 120"):
            made.stages.llm._prompt(sent("input", "llm", payload), rows)
    else:
        assert made.stages.llm._prompt(sent("input", "llm", payload), rows).bidirectional


def test_without_a_template_one_message_is_taken_as_it_is(made: Made, tmp_path: Path) -> None:
    for file in made.directory.iterdir():
        if file.name not in ("chat_template.json", "model.safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").symlink_to(made.directory / "model.safetensors")
    bare = Stages(tmp_path)
    payload = bare.input.process(request_of(CASES[1]))
    assert torch.equal(payload["token_ids"], processed(made.directory, CASES[1])["input_ids"][0])
    several = request_of(CASES[1]).messages * 2
    for messages in (several, request_of(Case("text", "hello")).messages):
        with pytest.raises(InvalidRequest, match="no chat template; send one user message with media"):
            bare.input.process(Request(request_id="r", messages=messages))
