"""The example of a model of one's own, served: its codes are those of the author's `imagine_codes`, its frames those of
his `imagine`, whatever happens to a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from truth_system import System

from own_model_package import PER_FRAME, Author, given, installed, prompt
from segue.messages.deltas import Delta, Finished, VideoDelta
from segue.messages.errors import InvalidRequest
from segue.messages.sampling import SamplingParams
from segue.orchestrator.omni.outputs import RequestOutput

TIGHT = {"max_tokens_per_step": 20, "block_size": 8, "kv_blocks": 56, "max_batch": 4}
"""A frame is prefilled in chunks, and four requests do not fit at once."""
REQUESTS = [given(0, 2, 4), given(1, 1, 3), given(2, 3, 5), given(3, 1, 4)]


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Author]:
    with installed(tmp_path_factory.mktemp("installed")):
        yield Author(tmp_path_factory.mktemp("action-video"))


@pytest.fixture(scope="module")
def system(author: Author) -> Iterator[System]:
    system = System(author.directory, stages={"trunk": TIGHT})
    yield system
    system.close()


def check(author: Author, output: RequestOutput, frames: np.ndarray, actions: np.ndarray) -> None:
    codes, video = author.imagine(frames, actions)
    assert output.token_ids["trunk"] == codes
    [made] = output.videos
    np.testing.assert_allclose(made.frames, video, atol=0.5 + 1e-2)


def counted(system: System, name: str) -> float:
    """A counter of the trunk, of the last report."""
    values = [
        stage.values for stats in system.omni.orchestrator.stats.values() for stage in stats.stages
        if stage.stage == "trunk"
    ]  # fmt: skip
    return float(values[0][name])  # type: ignore[arg-type]


def test_together_in_chunks_preempted_and_from_the_prefix_cache(system: System, author: Author) -> None:
    for _ in range(8):  # on a busy machine they may come one after the other, and have room
        for output, request in zip(system.ask(*(prompt(*request) for request in REQUESTS)), REQUESTS, strict=True):
            check(author, output, *request)
        system.run(system.refused())  # time for the trunk's report
        if counted(system, "preemptions_total"):
            break
    assert counted(system, "preemptions_total") > 0
    assert output.usage.prompt_modalities == {"image": PER_FRAME, "actions": 4 * 6}
    hits = counted(system, "prefix_hit_tokens_total")
    frames, actions = REQUESTS[0]
    [again] = system.ask(prompt(frames, actions))
    check(author, again, frames, actions)
    system.run(system.refused())
    for item in (0, 3):  # one number of an action is another: what is before it may be shared, and nothing else
        other = actions.copy()
        other[item, 2, 1] += 1
        [changed] = system.ask(prompt(frames, other))
        check(author, changed, frames, other)
        assert changed.token_ids != again.token_ids
    assert counted(system, "prefix_hit_tokens_total") > hits


@pytest.mark.parametrize("killed", [None, "trunk", "frames"])
def test_actions_appended_late_give_what_they_give_at_once(system: System, author: Author, killed: str | None) -> None:
    """Frame by frame: each action is sent when the frame before it has come; a worker is killed in mid-frame."""
    frames, actions = REQUESTS[0]

    async def body() -> tuple[Finished, list[VideoDelta]]:
        made: list[VideoDelta] = []
        end: Delta | None = None
        async with system.omni.open(system.omni.request(prompt(frames, actions[:1]))) as running:
            await running.append({"actions": actions[1:2]})
            async for end in running:
                if isinstance(end, VideoDelta):
                    made.append(end)
                    if len(made) == 3:
                        await running.close()
                    else:
                        await running.append({"actions": actions[len(made) + 1]})
                    if killed is not None and len(made) == 2:
                        system.kill(killed)
        assert isinstance(end, Finished)
        return end, made

    end, made = system.in_time(body, lambda found: killed is None or found[0].metrics.attempts > 1)
    codes, video = author.imagine(frames, actions)
    assert end.token_ids["trunk"] == codes
    assert [(delta.start, delta.frames) for delta in made] == [(0, 1), (1, 1), (2, 1)]
    np.testing.assert_allclose(np.concatenate([delta.array for delta in made]), video, atol=0.5 + 1e-2)
    assert end.metrics.attempts == (1 if killed is None else 2)


@pytest.mark.parametrize("killed", [False, True])
def test_a_video_goes_on(system: System, author: Author, killed: bool) -> None:
    """From its last frame and from an earlier one, as if all actions had been sent at once."""
    frames, actions = given(7 + killed, 2, 6)

    def further(after: RequestOutput, actions: np.ndarray) -> dict[str, Any]:
        return {**prompt(frames[:0], actions), "keep": True, "previous": after.request_id}

    [first] = system.ask({**prompt(frames, actions[:3]), "keep": True})
    check(author, first, frames, actions[:3])
    if killed:
        system.kill("trunk")
    [second] = system.ask(further(first, actions[3:5]))
    [third] = system.ask(further(second, actions[5:]))
    [other] = system.ask(further(first, actions[5:]))
    codes, video = author.imagine(frames, actions)
    assert [token for output in (first, second, third) for token in output.token_ids["trunk"]] == codes
    made = np.concatenate([output.videos[0].frames for output in (first, second, third)])
    np.testing.assert_allclose(made, video, atol=0.5 + 1e-2)
    codes, _ = author.imagine(frames, np.concatenate([actions[:3], actions[5:]]))
    assert other.token_ids["trunk"] == codes[2 * PER_FRAME :]
    assert second.usage.prompt_modalities["image"] == 4 * PER_FRAME
    computed = 4 * PER_FRAME + 3 * 6 - 1  # all but the code that was drawn last
    assert second.usage.cached_tokens == (0 if killed else computed // 8 * 8)
    if killed:
        system.run(system.replaced())
    for content in (prompt(frames, actions[3:4]), prompt(frames[:0], actions[:0])):
        with pytest.raises(InvalidRequest, match="send at least one item, and no image") as caught:
            system.ask({**content, "previous": first.request_id})
        assert caught.value.field == "messages"


def test_frames_as_images(system: System) -> None:
    """A frame is an image as well, if that is asked for; tensors may stand beside the messages."""
    frames, actions = REQUESTS[1]
    asked = {**prompt(frames, actions[:0]), "tensors": {"actions": actions}, "modalities": ["image", "video"]}
    [output] = system.ask(asked)
    assert len(output.images) == 3
    np.testing.assert_array_equal(np.stack([np.asarray(image) for image in output.images]), output.videos[0].frames)


FRAMES, ACTIONS = given(9, 1, 1)
NAN = np.full((1, 6, 3), np.nan, np.float32)


def tensor(**fields: Any) -> dict[str, Any]:
    return {"type": "tensor", "name": "actions", **fields}


@pytest.mark.parametrize(
    ("part", "field", "says"),
    [
        (tensor(data=ACTIONS, name="action"), "messages[0].content[1].name", "'action'; did you mean 'actions'?"),
        (tensor(data=ACTIONS.astype(np.float64)), "messages[0].content[1].dtype", "'float64'; of actions it must be"),
        (
            tensor(data=ACTIONS[:, :5]),
            "messages[0].content[1].shape",
            "[1, 5, 3]; of actions it must be [6, 3], or [it",
        ),
        (
            tensor(data=np.repeat(ACTIONS, 16, 0)),
            "messages[0].content[1]",
            "16 items of actions in this request; at mos",
        ),
        (tensor(data=NAN), "messages[0].content[1].data", "a tensor with nan; of actions it must be finite"),
        (tensor(data=[[1e39] * 3] * 6), "messages[0].content[1].data", "a tensor with inf; of actions it must be fin"),
        (
            tensor(data="AAAA", dtype="float32", shape=[1, 6, 3]),
            "messages[0].content[1].data",
            "3 bytes; of actions it",
        ),
        (tensor(data="AAAA", dtype="f4", shape=[6, 3]), "messages[0].content[1].dtype", "'f4'; known: bool, float16"),
        ({"type": "text", "text": "left"}, "messages[0].content[1]", "is text; this model takes images and actions"),
        (None, "messages", "0 items of actions for 1 images; the model needs at least 1"),
    ],
)
def test_wrong_tensors_are_named(system: System, part: dict[str, Any] | None, field: str, says: str) -> None:
    content = [{"type": "image", "image": FRAMES[0]}, *([] if part is None else [part])]
    with pytest.raises(InvalidRequest) as caught:
        system.ask({"messages": [{"role": "user", "content": content}], "modalities": ["video"]})
    assert caught.value.field == field
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(max_tokens=7), "sampling.trunk.max_tokens"),
        (SamplingParams(stop_token_ids=[3]), "sampling.trunk.stop_token_ids"),
        (SamplingParams(n=2), "sampling.trunk.n"),
    ],
)
def test_sampling_cannot_cut_a_frame(system: System, sampling: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{PER_FRAME}|one output") as caught:
        system.ask({**prompt(FRAMES, ACTIONS), "sampling": {"trunk": sampling}})
    assert caught.value.field == field


def test_what_cannot_be_appended(system: System) -> None:
    async def body() -> None:
        async with system.omni.open(system.omni.request(prompt(FRAMES, ACTIONS[:0]))) as running:
            with pytest.raises(InvalidRequest, match=r"append\['actions'\]\.shape is \[5, 3\]"):
                await running.append({"actions": ACTIONS[0, :5]})
            with pytest.raises(InvalidRequest, match="16 items of actions in this request; at most 15"):
                await running.append({"actions": np.repeat(ACTIONS, 16, 0)})
            await running.close()
            with pytest.raises(InvalidRequest, match="closed where more must follow"):
                await asyncio.wait_for(anext(running), 60)

    system.run(body())
