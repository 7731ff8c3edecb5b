"""Run transformers' own multimodal language model, as the reference for Segue's results."""

from __future__ import annotations

from typing import Any

from segue.messages.reference import LibraryAnswer, Question
from segue.messages.request import MediaPart, TextPart
from segue.models.shared.library import AutoModelForMultimodalLM, AutoProcessor
from segue.models.shared.reference import Library, Reference, clip_of, follow, image_of, samples_of

FPS = 2.0
"""Frames per second that the library's processors sample from a video."""


class MultimodalModel:
    """`Reference`."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._model: Any = library.load(AutoModelForMultimodalLM)
        self._processor: Any = AutoProcessor.from_pretrained(library.model_dir)

    def answer(self, question: Question) -> LibraryAnswer:
        metadata: list[dict[str, Any]] = []
        turns = [
            {"role": message.role, "content": [self._part(part, metadata) for part in message.content]}
            for message in question.request.messages
        ]
        made = self._processor.apply_chat_template(
            turns,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"video_metadata": [metadata]} if metadata else {},
        )
        inputs = self._library.ready(made, self._model)
        return LibraryAnswer(
            index=question.index,
            prompt_token_ids=made["input_ids"][0].tolist(),
            followed=follow(self._model, inputs, question, "llm"),
        )

    def _part(self, part: TextPart | MediaPart, metadata: list[dict[str, Any]]) -> dict[str, Any]:
        """A part in the format of chat templates; adds a video's properties to `metadata`."""
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        if part.kind == "image":
            return {"type": "image", "image": image_of(part)}
        if part.kind == "audio":
            return {"type": "audio", "audio": samples_of(part, self._processor.feature_extractor.sampling_rate)}
        frames = clip_of(part, FPS).frames
        count = len(frames)
        metadata.append({"total_num_frames": count, "fps": FPS, "frames_indices": list(range(count))})
        return {"type": "video", "video": frames.transpose(0, 3, 1, 2)}


def load(library: Library) -> Reference:
    return MultimodalModel(library)
