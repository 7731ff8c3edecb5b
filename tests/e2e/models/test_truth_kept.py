"""Requests that go on from earlier ones give what the whole conversation gives when it is sent at once; also when the
worker that held it was killed in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_process import tiny
from truth_system import BY_NAME, FILES, System, assert_same, library_answers

from lora_files import make_adapter, merge
from segue.messages.sampling import SamplingParams
from segue.models.text.causal_lm import tiny as causal_lm
from segue.orchestrator.omni.outputs import RequestOutput

TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
FIRST, SECOND, THIRD = list(range(30, 90, 3)), [611, 7, 300, 41], [5, 9]
BLOCK = 8


@pytest.fixture(scope="module")
def llm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kept")
    causal_lm.make("qwen2", directory / "base")
    adapter = make_adapter(directory / "base", directory / "adapter", ("q_proj", "v_proj"), rank=4, seed=0)
    merge(directory / "base", adapter, directory / "merged")
    return directory


@pytest.fixture(scope="module")
def llm(llm_dir: Path) -> Iterator[System]:
    stage = {"lora": {"adapters": {"adapter": str(llm_dir / "adapter")}}, "block_size": BLOCK}
    system = System(llm_dir / "base", stages={"llm": stage})
    yield system
    system.close()


def kept(prompt: Any, after: RequestOutput | None = None, **fields: Any) -> dict[str, Any]:
    given = prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt, "sampling": GREEDY}
    return {**given, "keep": True, "previous": None if after is None else after.request_id, **fields}


@pytest.mark.parametrize(("adapter", "killed"), [(None, False), (None, True), ("adapter", False)])
def test_a_language_model_goes_on(llm: System, llm_dir: Path, adapter: str | None, killed: bool) -> None:
    directory = llm_dir / ("base" if adapter is None else "merged")
    first = llm.run(llm.collect(kept(FIRST, adapter=adapter)))
    ids = first.token_ids["llm"]
    if killed:
        llm.kill("llm")
    second, other = llm.ask(kept(SECOND, first, adapter=adapter), kept(THIRD, first, adapter=adapter))
    third = llm.run(llm.collect(kept(THIRD, second, adapter=adapter)))
    so_far = [*FIRST, *ids, *SECOND]
    prompts = [FIRST, so_far, [*FIRST, *ids, *THIRD], [*so_far, *second.token_ids["llm"], *THIRD]]
    answers = [output.token_ids["llm"] for output in (first, second, other, third)]
    assert answers == library_answers(directory, prompts, TOKENS, eos_token_id=None)
    assert second.usage.prompt_tokens == len(so_far)
    if adapter is None and not killed:
        computed = len(FIRST) + TOKENS - 1  # all but its last token
        assert second.usage.cached_tokens == computed // BLOCK * BLOCK
    if killed:
        llm.run(llm.replaced())


def test_messages_follow_as_the_template_writes_them(llm: System) -> None:
    """Cut off, or ended by the token that the template writes after a reply."""

    async def body() -> None:
        asked = {"messages": [{"role": "user", "content": "What is at sea?"}], "sampling": GREEDY}
        more = [{"role": "user", "content": "And on land?"}]
        first = await llm.collect(kept(asked))
        said = await llm.omni.detokenize(first.token_ids["llm"])
        whole = [*asked["messages"], {"role": "assistant", "content": "REPLY"}, *more]
        rendered = await llm.omni.detokenize(await llm.omni.tokenize({"messages": whole}))
        before, after = rendered.split("REPLY")
        ids = await llm.omni.tokenize({"messages": more, "previous": first.request_id})
        begun = await llm.omni.tokenize(asked)
        assert ids[: len(begun) + TOKENS] == [*begun, *first.token_ids["llm"]]
        assert await llm.omni.detokenize(ids) == before + said + after
        end = ids[len(begun) + TOKENS]
        asked["sampling"] = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=[end])
        ended = await llm.collect(kept(asked))
        assert ended.token_ids["llm"] == [end]
        again = await llm.omni.tokenize({"messages": more, "previous": ended.request_id})
        assert again == [*begun, *ids[len(begun) + TOKENS :]]

    llm.run(body())


def shown(seed: int) -> np.ndarray:
    blocks = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    return np.kron(blocks, np.ones((28, 28, 1), np.uint8))


@pytest.mark.parametrize(  # positions on three axes, and plain ones
    "family", ["qwen2.5-vl", pytest.param("gemma3-vision", marks=pytest.mark.nightly)]
)
def test_a_model_that_sees_goes_on(tmp_path: Path, family: str) -> None:
    """With a text after an image, a second image after it, and the first image after a text."""

    def said(text: str, *images: np.ndarray) -> dict[str, Any]:
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
        return {"messages": [{"role": "user", "content": content}], "sampling": GREEDY}

    system = System(tiny(tmp_path / "model", family), stages={"llm": {"block_size": 4}})
    lake, hills = shown(1), shown(2)

    async def body() -> None:
        omni = system.omni
        begun = [await system.collect(kept(said(*asked))) for asked in (("What is this?", lake), ("Good morning!",))]
        turns = [
            (begun[0], said("And what is behind it?"), [lake]),
            (begun[0], said("Is it this?", hills), [lake, hills]),
            (begun[1], said("What is this?", hills), [hills]),
        ]
        prompts: list[list[int]] = []
        wholes: list[RequestOutput] = []
        answers: list[RequestOutput] = []
        for first, more, images in turns:
            prompts.append(await omni.tokenize({"messages": more["messages"], "previous": first.request_id}))
            whole = {"prompt_token_ids": prompts[-1], "multi_modal_data": {"image": images}, "sampling": GREEDY}
            wholes.append(await system.collect({**whole, "cache_salt": "apart"}))
            answers.append(await system.collect(kept(more, first)))
            assert_same(answers[-1], wholes[-1])
            computed = first.usage.prompt_tokens + TOKENS - 1  # all but its last token
            assert answers[-1].usage.cached_tokens >= computed // 4 * 4
        asked = said("And whose?", lake)
        last = {"messages": asked["messages"], "previous": answers[1].request_id}
        ids = await omni.tokenize(last)
        assert ids[: len(prompts[1]) + TOKENS] == [*prompts[1], *answers[1].token_ids["llm"]]
        system.kill("llm")
        for (first, more, _), whole in zip(turns, wholes, strict=True):
            assert_same(await system.collect(kept(more, first)), whole)
        at_once = {"prompt_token_ids": ids, "multi_modal_data": {"image": [lake, hills, lake]}, "sampling": GREEDY}
        assert_same(await system.collect({**asked, **last}), await system.collect({**at_once, "cache_salt": "apart"}))

    try:
        system.run(body())
    finally:
        system.close()


@pytest.mark.nightly  # test_mimo_audio_hears_the_codes_that_it_said takes the same path
def test_an_omni_model_hears_and_says_what_it_did(plain_system: System, assets: Path) -> None:
    case = BY_NAME["image"]
    prompt = case.prompt(assets)
    more = {"messages": [{"role": "user", "content": "And what is behind it?"}]}

    async def body() -> None:
        omni = plain_system.omni
        first = await plain_system.collect(kept(prompt))
        ids = await omni.tokenize({**more, "previous": first.request_id})
        begun = await omni.tokenize({"messages": prompt["messages"]})
        assert ids[: len(begun)] == begun
        assert ids[len(begun) :][: len(first.token_ids["thinker"])] == first.token_ids["thinker"]
        plain_system.kill("thinker")
        after_it = await plain_system.collect({**prompt, **more, "previous": first.request_id})
        again = await plain_system.collect({**prompt, **more, "previous": first.request_id})
        whole = {key: value for key, value in prompt.items() if key != "messages"}
        image = {"image": str(assets / FILES["image"])}
        at_once = await plain_system.collect({**whole, "prompt_token_ids": ids, "multi_modal_data": image})
        assert_same(after_it, at_once)
        assert_same(again, at_once)
        await plain_system.replaced()

    plain_system.run(body())


@pytest.fixture(scope="module")
def bagel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tiny(tmp_path_factory.mktemp("bagel") / "model", "bagel"))
    yield system
    system.close()


@pytest.mark.nightly  # test_server_bagel goes on from a stored image
def test_bagel_goes_on_from_the_image_that_it_drew(bagel: System) -> None:
    lake, ask, edit = "A red boat on a calm lake", "What do you see?", "Make the boat green"
    drawing = {"modalities": ["image"], "num_inference_steps": 4, "seed": 5}
    writing = {"modalities": ["text"], "sampling": SamplingParams(max_tokens=12)}

    def said(*parts: Any) -> list[dict[str, Any]]:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        return [{"role": "user", "content": content}]

    first = bagel.run(bagel.collect(kept({"messages": said(lake), "height": 64, "width": 96, **drawing})))
    shown = {"type": "image", "image": np.array(first.images[0])}
    for killed in (False, True):
        if killed:
            bagel.kill("llm")
        seen, edited = bagel.ask(
            kept({"messages": said(ask), **writing}, first), kept({"messages": said(edit), **drawing}, first)
        )
        whole, at_once = bagel.ask(
            {"messages": said(lake, shown, ask), **writing}, {"messages": said(lake, shown, edit), **drawing}
        )
        assert seen.token_ids == whole.token_ids
        assert seen.usage.prompt_tokens == whole.usage.prompt_tokens
        assert np.abs(np.array(edited.images[0], int) - np.array(at_once.images[0], int)).max() <= 1
    last = bagel.run(bagel.collect(kept({"messages": said(ask), **writing}, edited)))
    assert last.usage.prompt_tokens > seen.usage.prompt_tokens
    bagel.run(bagel.replaced())


def test_mimo_audio_hears_the_codes_that_it_said(tmp_path: Path) -> None:
    """They are what it goes on from, not a recording of them: the prefix cache has them under the same identity."""
    stages = {"llm": {"options": {"audio_temperature": 0}, "block_size": 4}}
    system = System(tiny(tmp_path / "model", "mimo-audio"), stages=stages)
    sampling = {"llm": SamplingParams(temperature=0.0, max_tokens=40)}
    asked = {"messages": [{"role": "user", "content": "Good morning!"}], "modalities": ["audio"], "sampling": sampling}
    more = {"messages": [{"role": "user", "content": "What was said?"}], "modalities": ["text"], "sampling": sampling}
    try:
        first = system.run(system.collect(kept(asked)))
        assert first.audio is not None
        assert first.audio.samples.size
        second = system.run(system.collect(kept(more, first)))
        read = first.usage.prompt_tokens + len(first.token_ids["llm"]) - 1
        assert second.usage.cached_tokens == read // 4 * 4
        assert second.usage.prompt_modalities["audio"] > 0
        system.kill("llm")
        again = system.run(system.collect(kept(more, first)))
        assert_same(again, second)
        assert again.usage.cached_tokens == 0
        spoken = system.run(system.collect(kept({**asked, "messages": more["messages"]}, second)))
        assert spoken.audio is not None
    finally:
        system.close()
