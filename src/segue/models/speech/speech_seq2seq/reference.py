"""Run transformers' own encoder-decoder that transcribes audio, as the reference for Segue's results."""

from __future__ import annotations

from typing import Any

import torch

from segue.messages.reference import LibraryAnswer, Question
from segue.models.shared.library import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq
from segue.models.shared.reference import Follow, Library, Reference, media_of, most_tokens, processors, samples_of


class SpeechModel:
    """`Reference`, for recordings that fit into one window."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._model: Any = library.load(AutoModelForSpeechSeq2Seq)
        self._extractor: Any = AutoFeatureExtractor.from_pretrained(library.model_dir)

    def answer(self, question: Question) -> LibraryAnswer:
        request = question.request
        [part] = media_of(request)
        rate = self._extractor.sampling_rate
        made = self._extractor(
            samples_of(part, rate), sampling_rate=rate, return_tensors="pt", return_attention_mask=True
        )
        reply = Follow(question.token_ids["llm"])
        most = most_tokens(request, "llm")
        asked = {name: request.options[name] for name in ("task", "language") if name in request.options}
        with torch.inference_mode():
            self._model.generate(
                **self._library.ready(made, self._model),
                **asked,
                max_new_tokens=min(most, reply.most),
                logits_processor=processors(reply),
            )
        return LibraryAnswer(index=question.index, followed=[reply.followed("llm", most)])


def load(library: Library) -> Reference:
    return SpeechModel(library)
