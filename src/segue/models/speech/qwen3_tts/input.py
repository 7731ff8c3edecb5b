"""The input stage: a text to say → the talker's prompt. `stages` documents the payload.

The prompt is that of the package's `generate_custom_voice` and `generate_voice_design` (with `non_streaming_mode`,
their default): text tokens above, codec tokens below, `·` none::

    <|im_start|> user ⏎ instructions <|im_end|> ⏎      only if there are instructions
    ·            ·    · ·            ·          ·
    <|im_start|> assistant ⏎  pad   pad       pad      pad       pad    bos   text… eos  pad
    ·            ·         ·  think think-bos language think-eos voice  pad   pad…  pad  bos

Without a language: `nothink think-bos think-eos`. Voice design has no voice.

A text that is appended to (an open request) has the package's other form, without `non_streaming_mode`: the prompt ends
with the text's first token over `bos`, and each further token, and at last `eos`, is a row of the talker's next step.
"""

from __future__ import annotations

from typing import Any

import torch

from segue.engines.contract import LoadContext, Payload
from segue.graph.parts import TOKENS
from segue.messages.errors import ConfigError, InvalidRequest, NotFound, nearest, wrong
from segue.messages.request import Request
from segue.models.shared.checkpoint.pretrained import errors_only
from segue.models.shared.input_stage import InputStage
from segue.models.shared.speech.text import text_to_say
from segue.models.shared.text.prompt import check_length, check_text, client_tokens, own_tokens_only
from segue.models.shared.text.tokenizer import load_tokenizer
from segue.models.speech.qwen3_tts.config import AUTO, Config, read_config

NONE = -1
"""Codec id of a position without one."""
_STAGE = "talker"
_ADVICE = "; how to say it is the option instructions"
_ROLE = 3
"""Tokens before a turn's text: its beginning, the role, a line break."""
Pairs = list[tuple[int, int]]
"""(text id, codec id) of each position."""


class InputProcessor(InputStage):
    """Takes one user message, or a bare prompt: the text to say. Options: `instructions`, `language`."""

    def __init__(self, ctx: LoadContext) -> None:
        """Raises `ConfigError` for a checkpoint without a tokenizer."""
        self._config: Config = read_config(ctx.model_dir)
        with errors_only("transformers"):  # it warns that it does not know the model
            tokenizer = load_tokenizer(ctx.model_dir)
        if tokenizer is None:
            raise ConfigError(f"{ctx.model_dir}: the checkpoint has no tokenizer", field="model")
        self._tokenizer: Any = tokenizer
        self._voices = dict(zip(self._config.voices, self._config.talker_config.spk_id, strict=False))
        longest = self._config.talker_config.max_position_embeddings
        self._longest = min(ctx.max_model_len or longest, longest)
        self._before = {role: self._marked(f"<|im_start|>{role}\n") for role in ("user", "assistant")}
        self._after = self._marked("<|im_end|>\n")
        if len(self._before["assistant"]) != _ROLE or len(self._after) != 2:
            raise ConfigError(f"{ctx.model_dir}: the tokenizer lacks the tokens of a chat's turns", field="model")
        largest, size = max(tokenizer.get_vocab().values()), self._config.talker_config.text_vocab_size
        if largest >= size:
            raise ConfigError(
                f"{ctx.model_dir}: the tokenizer has token {largest}, but text_vocab_size is {size}",
                field="text_vocab_size",
            )

    def process(self, request: Request) -> Payload:
        """The payload of one request. Raises `InvalidRequest` with the field, its value and the accepted values."""
        text, field = text_to_say(request, _ADVICE)
        ids = self._ids(text, request, field)
        codec = self._codec_ids(request)
        if request.open:
            return self._begun(ids, codec, request)
        pairs = [*self._instructions(request), *self._spoken(ids, codec)]
        if not own_tokens_only(request):
            check_length(len(pairs), self._longest, field)
        text_ids, codec_ids = torch.tensor(pairs, dtype=torch.long).T
        seen = client_tokens(ids, self._tokenizer) if TOKENS in request.modalities else {}
        return {"text_ids": text_ids.contiguous(), "codec_ids": codec_ids.contiguous(), **seen}

    def process_appended(self, request: Request) -> Payload:
        """The ids of a piece of the text. Raises `InvalidRequest`."""
        _check_no_reply(request)
        if request.prompt is None:
            raise wrong("append", "token ids", "text: this model says it")
        return {"following": torch.tensor(self._ids(request.prompt, request, "append"), dtype=torch.long)}

    def _begun(self, ids: list[int], codec: list[int], request: Request) -> Payload:
        """The payload of an open request: its prompt, and the ids after the first."""
        _check_no_reply(request)
        if not ids:
            raise InvalidRequest("the text that the request begins with has no token", field="messages")
        pairs = [
            *self._instructions(request),
            *self._head(codec),
            (ids[0], self._config.talker_config.codec_bos_id),
        ]
        text_ids, codec_ids = torch.tensor(pairs, dtype=torch.long).T
        return {
            "text_ids": text_ids.contiguous(),
            "codec_ids": codec_ids.contiguous(),
            "following": torch.tensor(ids[1:], dtype=torch.long),
        }

    def _instructions(self, request: Request) -> Pairs:
        text = request.options.get("instructions")
        if text is None or text == "":
            return []
        if not isinstance(text, str):
            raise wrong("options.instructions", text, "a text")
        if not self._config.takes_instructions:
            raise InvalidRequest(
                "instructions are given, but this model (tts_model_size 0b6) takes none", field="options.instructions"
            )
        ids = self._ids(text, request, "options.instructions")
        return [(token, NONE) for token in (*self._before["user"], *ids, *self._after)]

    def _spoken(self, ids: list[int], codec: list[int]) -> Pairs:
        """[text], [codec ids before the pad] → everything after the instructions."""
        config, talker = self._config, self._config.talker_config
        return [
            *self._head(codec),
            *((token, talker.codec_pad_id) for token in (*ids, config.tts_eos_token_id)),
            (config.tts_pad_token_id, talker.codec_bos_id),
        ]

    def _head(self, codec: list[int]) -> Pairs:
        """[codec ids before the pad] → everything between the instructions and the text."""
        config = self._config
        return [
            *((token, NONE) for token in self._before["assistant"]),
            *((config.tts_pad_token_id, code) for code in codec),
            (config.tts_bos_token_id, config.talker_config.codec_pad_id),
        ]

    def _codec_ids(self, request: Request) -> list[int]:
        """Language and voice."""
        talker = self._config.talker_config
        voice, language = self._voice(request.voice), self._language(request.options.get("language"))
        if language in (AUTO, "chinese") and (dialect := talker.spk_is_dialect.get(voice or "")):
            language = str(dialect)
        if language == AUTO:
            codes = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
        else:
            spoken = talker.codec_language_id[language]
            codes = [talker.codec_think_id, talker.codec_think_bos_id, spoken, talker.codec_think_eos_id]
        return codes if voice is None else [*codes, talker.spk_id[voice]]

    def _voice(self, name: str | None) -> str | None:
        """The config's name of a voice. Raises `NotFound`."""
        if name is None:
            return next(iter(self._voices.values()), None)
        known = {client.lower(): own for client, own in self._voices.items()}
        if name.lower() in known:
            return known[name.lower()]
        if not known:
            raise NotFound(
                f"voice is {name!r}; this model has no voices: describe one in the option instructions", field="voice"
            )
        raise NotFound(
            f"voice is {name!r}{nearest(name, self._voices)}; this model speaks with: {', '.join(self._voices)}",
            field="voice",
        )

    def _language(self, name: Any) -> str:
        if name is None:
            return AUTO
        if not isinstance(name, str) or name.lower() not in self._config.languages:
            raise wrong("options.language", name, f"one of {', '.join(self._config.languages)}")
        return name.lower()

    def _ids(self, text: str, request: Request, field: str) -> list[int]:
        """The ids of a client's text, in which no text stands for a special token."""
        check_text(text, self._tokenizer, request, self._longest, _STAGE, field)
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _marked(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _check_no_reply(request: Request) -> None:
    if request.reply:
        raise wrong("reply", True, "left out: this model says the text while it is appended")
