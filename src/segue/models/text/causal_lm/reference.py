"""Run transformers' own language model, as the reference for Segue's results."""

from __future__ import annotations

from typing import Any

import torch

from segue.messages.reference import LibraryAnswer, Question
from segue.models.shared.library import AutoModelForCausalLM
from segue.models.shared.reference import Library, Reference, follow, text_of
from segue.models.shared.text.tokenizer import load_tokenizer


class LanguageModel:
    """`Reference`."""

    def __init__(self, library: Library) -> None:
        self._model: Any = library.load(AutoModelForCausalLM)
        self._tokenizer: Any = load_tokenizer(library.model_dir)

    def answer(self, question: Question) -> LibraryAnswer:
        request = question.request
        if request.prompt_token_ids is not None:
            ids = request.prompt_token_ids
        elif request.messages:
            turns = [{"role": "user", "content": text_of(request)}]
            ids = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = self._tokenizer(request.prompt)["input_ids"]
        prompt = torch.tensor([ids], device=self._model.device)
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        return LibraryAnswer(
            index=question.index,
            prompt_token_ids=list(ids),
            followed=follow(self._model, inputs, question, "llm", pad_token_id=0),
        )


def load(library: Library) -> Reference:
    return LanguageModel(library)
