"""A model that sees through the whole system, on a real photograph and a real clip: what comes out is what transformers
gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from truth_system import System, spans

from lora_files import make_adapter, merge
from segue.media.limits import MediaLimits
from segue.media.parts import messages_from
from segue.media.sources import PYTHON_POLICY
from segue.media.video import decode_video
from segue.messages.errors import InvalidRequest
from segue.messages.request import MediaPart
from segue.messages.sampling import SamplingParams
from segue.models.omni.multimodal_lm.tiny import presets as tiny
from segue.models.shared.library import AutoModelForMultimodalLM, AutoProcessor

FAMILY = "qwen3-vl"
TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)
FPS = 2.0


class Library:
    """transformers on the checkpoint."""

    def __init__(self, directory: Path, assets: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(directory)
        self.model = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.assets = assets

    def answer(self, text: str, *kinds: str) -> tuple[list[int], int]:
        """(reply, prompt tokens)."""
        content: list[dict[str, Any]] = []
        metadata = []
        for kind in kinds:
            if kind == "image":
                content.append({"type": kind, kind: Image.open(self.assets / "photo.jpg").convert("RGB")})
            else:
                frames = self._frames()
                count = len(frames)
                metadata.append({"total_num_frames": count, "fps": FPS, "frames_indices": list(range(count))})
                content.append({"type": kind, kind: frames.transpose(0, 3, 1, 2)})
        inputs = self.processor.apply_chat_template(
            [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"video_metadata": [metadata]} if metadata else {},
        )
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
        length = inputs["input_ids"].shape[1]
        return out[0, length:].tolist(), length

    def _frames(self) -> np.ndarray[Any, Any]:
        """As the media room decodes the clip, which has tests of its own."""
        content = [{"type": "video", "video": self.assets / "video.mp4"}]
        [message] = messages_from([{"role": "user", "content": content}], PYTHON_POLICY)
        [part] = message.content
        assert isinstance(part, MediaPart)
        return decode_video(part, FPS, MediaLimits()).frames


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, assets: Path) -> Iterator[tuple[System, Library, Library]]:
    """A model, the library on it, and the library on it with an adapter merged in."""
    directory = tmp_path_factory.mktemp(FAMILY)
    tiny.make(FAMILY, directory)
    of = AutoModelForMultimodalLM
    poet = make_adapter(
        directory, directory / "poet", ("q_proj", "down_proj"), rank=4, seed=3, of=of, within="model.language_model"
    )
    lora = {"adapters": {"poet": str(poet)}, "max_rank": 4}
    system = System(
        directory,
        stages={"llm": {"max_tokens_per_step": 64, "lora": lora}},
        limits={"max_prompt_embeds_bytes": "1MiB"},
    )
    yield system, Library(directory, assets), Library(merge(directory, poet, directory / "merged", of), assets)
    system.close()


def ask(assets: Path, text: str, *kinds: str, adapter: str | None = None) -> dict[str, Any]:
    files = {"image": assets / "photo.jpg", "video": assets / "video.mp4", "audio": assets / "speech.wav"}
    content = [*({"type": kind, kind: files[kind]} for kind in kinds), {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "sampling": GREEDY, "adapter": adapter}


QUESTIONS = (
    ("what is this",),
    ("what is this", "image"),
    ("and what happens here", "video"),
    ("is the one out of the other, or are they of two places?", "image", "video"),
    ("are they the same?", "image", "image"),
)


def test_all_at_once_and_once_more(running: tuple[System, Library, Library], assets: Path) -> None:
    system, library, _ = running
    expected = [library.answer(*question) for question in QUESTIONS]
    assert len({tuple(reply) for reply, _ in expected}) == len(QUESTIONS)
    for _ in range(2):
        outputs = system.ask(*(ask(assets, *question) for question in QUESTIONS))
        for output, question, (reply, length) in zip(outputs, QUESTIONS, expected, strict=True):
            assert output.token_ids == {"llm": reply}
            assert output.usage.prompt_tokens == length
            assert ("encoder" in spans(output)) == (len(question) > 1)
    assert all(output.usage.cached_tokens > 32 for output in outputs[1:])


def test_prompts_with_their_media_beside_them(running: tuple[System, Library, Library], assets: Path) -> None:
    """As vLLM's users write them: text or ids with placeholders, and `multi_modal_data`."""
    system, library, _ = running
    reply, _ = library.answer("what is this", "image")
    image = library.processor.image_token
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is this"}]}]
    text = library.processor.apply_chat_template(chat, add_generation_prompt=True)
    data = {"multi_modal_data": {"image": Image.open(assets / "photo.jpg")}, "sampling": GREEDY}
    ids = library.processor.tokenizer(text)["input_ids"]
    for output in system.ask({"prompt": text, **data}, {"prompt_token_ids": ids, **data}):
        assert output.token_ids == {"llm": reply}
    with pytest.raises(InvalidRequest, match="prompt has 2 placeholders for image, but multi_modal_data has 1 image"):
        system.ask({"prompt": text + image, **data})
    with pytest.raises(InvalidRequest, match="in 'messages', media are parts of content") as caught:
        system.ask({"messages": chat, **data})
    assert caught.value.field == "multi_modal_data"


def test_embeddings_among_media(running: tuple[System, Library, Library], assets: Path) -> None:
    """Parts of a message as embeddings of their text, before and after an image and a clip; and a whole prompt."""
    system, library, _ = running
    tokenizer, table = library.processor.tokenizer, library.model.get_input_embeddings()

    def rows(text: str) -> torch.Tensor:
        return table(torch.tensor(tokenizer(text)["input_ids"])).detach()

    texts = ("Here is one.", "And this is the other.", "Do they differ?")
    image, clip = assets / "photo.jpg", assets / "video.mp4"
    media = [{"type": "image", "image": image}, {"type": "video", "video": clip}]

    def asked(*parts: dict[str, Any]) -> dict[str, Any]:
        content = [parts[0], media[0], parts[1], media[1], parts[2]]
        return {"messages": [{"role": "user", "content": content}], "sampling": GREEDY}

    plain = [{"type": "text", "text": text} for text in texts]
    given = [{"type": "prompt_embeds", "data": rows(text)} for text in texts]
    [expected] = system.ask(asked(*plain))
    for parts in (given, [given[0], plain[1], given[2]], given):
        [output] = system.ask(asked(*parts))
        assert output.token_ids == expected.token_ids
        assert output.usage.prompt_tokens == expected.usage.prompt_tokens
    assert output.usage.cached_tokens > 32
    [other] = system.ask(asked(given[0], given[0], given[2]))
    assert other.token_ids != expected.token_ids
    text = tokenizer.decode(tokenizer("Say something about the sea, and the hills behind it.")["input_ids"])
    one, same = system.ask({"prompt": text, "sampling": GREEDY}, {"prompt_embeds": rows(text), "sampling": GREEDY})
    assert one.token_ids == same.token_ids
    with pytest.raises(InvalidRequest, match="prompt_embeds have no token ids"):
        system.ask({**asked(*given), "sampling": SamplingParams(prompt_logprobs=1).over(GREEDY)})


def test_with_an_adapter_beside_requests_without(running: tuple[System, Library, Library], assets: Path) -> None:
    system, library, merged = running
    names = {None: library, "poet": merged}
    asked = [(question, adapter) for question in QUESTIONS[:4] for adapter in names]
    outputs = system.ask(*(ask(assets, *question, adapter=adapter) for question, adapter in asked))
    answers = [names[adapter].answer(*question)[0] for question, adapter in asked]
    assert [output.token_ids["llm"] for output in outputs] == answers
    assert all(plain != adapted for plain, adapted in zip(answers[::2], answers[1::2], strict=True))


def test_a_kind_that_the_model_does_not_take(running: tuple[System, Library, Library], assets: Path) -> None:
    system, *_ = running
    with pytest.raises(InvalidRequest, match="audio"):
        system.ask(ask(assets, "what was said", "audio"))
