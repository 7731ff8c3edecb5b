"""The input stage: a text to say → the language model's prompt. `stages` documents the payload.

The prompt is that of the published chat template, with the generation prompt (¶: two line breaks, ⏎: one):

    <|begin_of_text|>
    <|start_header_id|>system<|end_header_id|>¶system message
        ¶<|scene_desc_start|>⏎description of the scene⏎<|scene_desc_end|>        only if there is a description
    <|eot_id|>
    <|start_header_id|>user<|end_header_id|>¶text<|eot_id|>
    <|start_header_id|>assistant<|end_header_id|>¶<|audio_out_bos|>

The ids are built part by part, so that no text becomes a special token.
"""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import ConfigError, InvalidRequest, NotFound, wrong
from segue.messages.request import Message, Request
from segue.models.shared.decoder.generation import context_length
from segue.models.shared.input_stage import InputStage
from segue.models.shared.speech.text import check_not_blank, form_of, text_of
from segue.models.shared.text.prompt import check_length, check_text, client_tokens, own_tokens_only
from segue.models.shared.text.tokenizer import load_tokenizer
from segue.models.speech.higgs_audio_v2.loading import load_config

SYSTEM = "Generate audio following instruction."
"""The system message if a request has none."""
_STAGE = "llm"
_ADVICE = ": speech in the voice of a recording is not served"
_MARKS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|scene_desc_start|>",
    "<|scene_desc_end|>",
    "<|audio_out_bos|>",
)


class InputProcessor(InputStage):
    """Takes the text to say: a user message, after a system message and the scene, if they are given; or a bare prompt.
    Options: `instructions`, the description of the scene."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for a checkpoint without a tokenizer, or with one that lacks the template's tokens."""
        config = load_config(ctx)
        self._longest = context_length(config, ctx.max_model_len)
        tokenizer = load_tokenizer(ctx.model_dir)
        if tokenizer is None:
            raise ConfigError(f"{ctx.model_dir}: the checkpoint has no tokenizer", field="model")
        self._tokenizer: Any = tokenizer
        vocabulary = tokenizer.get_vocab()
        missing = [mark for mark in _MARKS if mark not in vocabulary]
        if missing:
            raise ConfigError(f"{ctx.model_dir}: the tokenizer has no token {missing[0]!r}", field="model")
        self._marks: dict[str, int] = {mark: vocabulary[mark] for mark in _MARKS}
        if self._marks["<|audio_out_bos|>"] != config.audio_bos_token_id:
            raise ConfigError(
                f"{ctx.model_dir}: <|audio_out_bos|> is token {self._marks['<|audio_out_bos|>']}, but "
                f"audio_bos_token_id is {config.audio_bos_token_id}",
                field="audio_bos_token_id",
            )

    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values, and
        `NotFound` for a voice."""
        if request.voice is not None:
            raise NotFound(
                f"voice is {request.voice!r}; this model has no voices: describe one in the option instructions",
                field="voice",
            )
        system, scene, text, field = _said(request)
        described = request.options.get("instructions")
        if described is not None and not isinstance(described, str):
            raise wrong("options.instructions", described, "a text")
        if described and scene:
            raise InvalidRequest(
                "options.instructions and a message of the role scene both describe the scene; send one of them",
                field="options.instructions",
            )
        ids = self._prompt(request, field, system, (described or scene).strip(), text)
        if not own_tokens_only(request):
            check_length(len(ids), self._longest, field)
        seen = client_tokens(ids, self._tokenizer) if TOKENS in request.modalities else {}
        return {"token_ids": torch.tensor(ids, dtype=torch.long), **seen}

    def _prompt(self, request: Request, field: str, system: str, scene: str, text: str) -> list[int]:
        before = f"\n\n{system.strip()}"
        parts = ["<|begin_of_text|>", "<|start_header_id|>", "system", "<|end_header_id|>"]
        if scene:
            parts += [f"{before}\n\n", "<|scene_desc_start|>", f"\n{scene}\n", "<|scene_desc_end|>"]
        else:
            parts.append(before)
        parts += ["<|eot_id|>", "<|start_header_id|>", "user", "<|end_header_id|>", f"\n\n{text.strip()}", "<|eot_id|>"]
        parts += ["<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n", "<|audio_out_bos|>"]
        ids: list[int] = []
        for part in parts:
            if part in self._marks:  # a client's text is always longer: it follows line breaks
                ids.append(self._marks[part])
                continue
            check_text(part, self._tokenizer, request, self._longest, _STAGE, field)
            ids += self._tokenizer(part, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids


def _said(request: Request) -> tuple[str, str, str, str]:
    """(system message, description of the scene, the text to say, the field that it is in). Raises `InvalidRequest`."""
    form = form_of(request)
    if form == "prompt":
        system, scene, text = SYSTEM, "", request.prompt or ""
    else:
        system, scene, text = _of(request.messages)
    check_not_blank(text, form)
    return system, scene, text, form


def _of(messages: list[Message]) -> tuple[str, str, str]:
    """(system message, scene, text) of a conversation. Raises `InvalidRequest`."""
    roles = [message.role for message in messages]
    wanted = [role for role in ("system", "scene") if role in roles] + ["user"]
    if roles != wanted:
        raise InvalidRequest(
            f"the messages are of the roles {', '.join(roles)}; this model takes a system message and the scene, both "
            "optional, and then the text to say as one user message",
            field="messages",
        )
    texts = {message.role: text_of(message, number, _ADVICE) for number, message in enumerate(messages)}
    return texts.get("system", SYSTEM), texts.get("scene", ""), texts["user"]
