"""Call transformers' own CSM: the reference that Segue is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from segue.messages.reference import LibraryAnswer, Question
from segue.messages.request import MediaPart, Request, TextPart
from segue.models.shared.reference import Follow, Library, most_tokens, processors, samples_of
from segue.models.speech.csm.family import speaker
from segue.models.speech.csm.input import speaker_of
from segue.models.speech.csm.library import CsmForConditionalGeneration, CsmProcessor

_STAGE = "backbone"


@dataclass(frozen=True)
class Reference:
    """transformers' model and processor on a checkpoint; `segue.models.shared.reference.Reference`."""

    library: Library
    model: Any
    processor: Any

    def answer(self, question: Question) -> LibraryAnswer:
        """The backbone is forced to follow Segue's reply in the first codes."""
        codes = Follow(question.token_ids.get(_STAGE, []))
        most = most_tokens(question.request, _STAGE)
        samples = self.spoken(question.request, min(most, codes.most), codes)
        return LibraryAnswer(index=question.index, followed=[codes.followed(_STAGE, most)], samples=samples.tobytes())

    def spoken(self, request: Request, rows: int, *changes: Follow) -> np.ndarray:
        """[samples] float32 of a greedy utterance of at most so many rows of codes. `changes`: to the first codes."""
        with torch.inference_mode():
            [samples] = self.model.generate(
                **self.library.ready(self._read(request), self.model),
                do_sample=False,
                depth_decoder_do_sample=False,
                max_new_tokens=rows,
                logits_processor=processors(*changes),
                output_audio=True,
            )
        found: np.ndarray = samples.float().cpu().numpy().astype("<f4")
        return found

    def _read(self, request: Request) -> Any:
        """Model inputs of a conversation."""
        conversation = []
        for number, message in enumerate(request.messages):
            text = "\n".join(part.text for part in message.content if isinstance(part, TextPart))
            content: list[dict[str, Any]] = [{"type": "text", "text": text}]
            for part in message.content:
                if isinstance(part, MediaPart):
                    rate = self.processor.feature_extractor.sampling_rate
                    content.append({"type": "audio", "path": samples_of(part, rate)})
            conversation.append({"role": speaker_of(message, number, speaker(request.voice)), "content": content})
        return self.processor.apply_chat_template(conversation, tokenize=True, return_dict=True)


def load(library: Library) -> Reference:
    """Load transformers' model of a checkpoint."""
    return Reference(
        library, library.load(CsmForConditionalGeneration), CsmProcessor.from_pretrained(library.model_dir)
    )
