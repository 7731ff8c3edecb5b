"""The input stage of Pocket TTS: a text to say → its ids. `stages` documents the payload.

The prompt is that of the checkpoint's chat template, with one placeholder for the frames of the voice.
"""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import ConfigError, InvalidRequest, NotFound, nearest
from segue.messages.request import Request
from segue.models.shared.checkpoint.files import read_object
from segue.models.shared.decoder.generation import context_length
from segue.models.shared.input_stage import InputStage
from segue.models.shared.speech.text import text_to_say
from segue.models.shared.text.prompt import check_length, check_text, client_tokens, own_tokens_only
from segue.models.shared.text.tokenizer import load_tokenizer
from segue.models.speech.pocket_tts.loading import load_config, voice_names

_STAGE = "backbone"
_AFTER = {"short_text_max_words": 4, "frames_after_eos_short_text": 4, "frames_after_eos": 2}
"""The library's defaults of the processor's settings."""


class InputProcessor(InputStage):
    """Takes one user message, or a bare prompt: the text to say. No options."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for a checkpoint without a tokenizer or a chat template."""
        config = load_config(ctx)
        tokenizer: Any = load_tokenizer(ctx.model_dir)
        if tokenizer is None or not tokenizer.chat_template:
            raise ConfigError(f"{ctx.model_dir}: needs a tokenizer with a chat template", field="model")
        self._tokenizer = tokenizer
        self._longest = context_length(config, ctx.max_model_len)
        self._voices = voice_names(ctx.model_dir)
        self._voice_token: int = config.audio_prompt_token_id
        self._ids = {
            config.audio_prompt_token_id,
            config.audio_latent_token_id,
            config.audio_prompt_bos_token_id,
            config.audio_bos_token_id,
        }
        path = ctx.model_dir / "processor_config.json"
        given = read_object(path) if path.is_file() else {}
        self._after: dict[str, int] = {name: given.get(name, value) for name, value in _AFTER.items()}

    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values, and
        `NotFound` for an unknown voice."""
        voice = voice_of(request.voice, self._voices)
        text, field = text_to_say(request)
        check_text(text, self._tokenizer, request, self._longest, _STAGE, field)
        written = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if special := sorted(self._ids & set(written)):
            name = self._tokenizer.convert_ids_to_tokens(special[0])
            raise InvalidRequest(f"{field} has {name!r}, which marks a place of the prompt; leave it out", field=field)
        ids = self._prompt(text, voice=bool(voice))
        if not own_tokens_only(request):
            check_length(len(ids), self._longest, field)
        words = len(self._tokenizer.decode(ids, skip_special_tokens=True).split())
        short = "_short_text" if words <= self._after["short_text_max_words"] else ""
        seen = client_tokens(ids, self._tokenizer) if TOKENS in request.modalities else {}
        return {
            "token_ids": torch.tensor(ids, dtype=torch.long),
            "voice": voice,
            "frames_after_eos": self._after[f"frames_after_eos{short}"],
            **seen,
        }

    def _prompt(self, text: str, *, voice: bool) -> list[int]:
        """Raises `ConfigError` for a chat template that leaves out the voice."""
        content: list[dict[str, str]] = [{"type": "audio"}] if voice else []
        content.append({"type": "text", "text": text})
        conversation = [{"role": "user", "content": content}]
        written = self._tokenizer.apply_chat_template(conversation, tokenize=False)
        ids: list[int] = self._tokenizer(written)["input_ids"]
        if ids.count(self._voice_token) != voice:
            raise ConfigError("the checkpoint's chat template has no place for the voice", field="model")
        return ids


def voice_of(name: str | None, voices: tuple[str, ...]) -> str:
    """The name of the voice to speak with: the first one by default; empty if the checkpoint has none. Raises
    `NotFound`."""
    if name is None:
        return voices[0] if voices else ""
    if name not in voices:
        known = nearest(name, voices) if voices else "; this model has no voices"
        raise NotFound(f"voice is {name!r}{known}", field="voice")
    return name
