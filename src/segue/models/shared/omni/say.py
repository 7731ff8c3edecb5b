"""Saying a given text with an omni model: the text is its reply, given instead of sampled. No torch here.

The thinker computes the reply as if it had written it, so the talker receives its hidden states as after any reply.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from segue.messages.errors import InvalidRequest, wrong
from segue.messages.request import Message, Request, TextPart
from segue.messages.sampling import SamplingParams
from segue.messages.speech import TextToSpeech

SAY = "say"
"""The option: true if the reply is the text of the user's message."""
_ASK = "Read the following text aloud, word for word, and say nothing else.\n\n"
"""What the user says before the text, so that the text is a likely reply."""
_LONGEST = 32768
"""Codes of the talker: about eleven minutes at 50 codes a second. The library's limit would cut longer texts."""
_TOKENIZERS = ("tokenizer.json", "vocab.json")


def says(config: dict[str, Any], model_dir: Path) -> TextToSpeech | None:
    """How a checkpoint of a thinker and a talker says a text; None without a talker or a tokenizer."""
    if not config.get("enable_audio_output", True) or not any((model_dir / name).is_file() for name in _TOKENIZERS):
        return None
    return TextToSpeech(options={SAY: True}, sampling={"talker": SamplingParams(max_tokens=_LONGEST)})


def text_to_say(request: Request, stage: str) -> str | None:
    """The text that the request wants said; None if it wants a reply. `stage`: the one that writes the reply.

    Raises `InvalidRequest` if the option is no bool, the last message is not a user's text, the prompt is to end in
    another way, or the stage's sampling is set, which would have no effect.
    """
    asked = request.options.get(SAY, False)
    if not isinstance(asked, bool):
        raise wrong(f"options.{SAY}", asked, "true or false")
    if not asked:
        return None
    if request.chat.continue_final_message or not request.chat.add_generation_prompt:
        raise InvalidRequest(
            f"options.{SAY} is true, so the text begins a reply: leave out continue_final_message and "
            "add_generation_prompt",
            field=f"options.{SAY}",
        )
    last = request.messages[-1] if request.messages else None
    if last is None or last.role != "user" or not all(isinstance(part, TextPart) for part in last.content):
        raise InvalidRequest(
            f"options.{SAY} is true, so the last of the messages must be a user's, with the text to say and no media",
            field="messages",
        )
    text = "".join(part.text for part in last.content if isinstance(part, TextPart)).strip()
    if not text:
        raise InvalidRequest("the text to say is empty; write at least one word", field="messages")
    own = request.sampling.get(stage)
    if own is not None and own != SamplingParams():
        given = ", ".join(json.loads(msgspec.json.encode(own)))
        raise InvalidRequest(
            f"sampling.{stage} has {given}, but options.{SAY} is true: its reply is the text to say; leave it out",
            field=f"sampling.{stage}",
        )
    return text


def asking(messages: list[Message], text: str, system: str | None) -> list[Message]:
    """The conversation in which `text` is the reply: the last message asks for it. `system`: the first message of a
    conversation that has none of that role, if the model needs one to speak."""
    before = messages[:-1]
    if system is not None and not any(message.role == "system" for message in before):
        before = [Message("system", [TextPart(system)]), *before]
    return [*before, Message("user", [TextPart(_ASK + text)])]


def given_reply(ids: list[int], ends: frozenset[int]) -> list[int]:
    """`Prompt.reply` for the ids of a text to say: with an end token after them, whichever it is, since the last token
    of a reply is never heard. Empty if there is no text."""
    return [*ids, max(ends, default=0)] if ids else []
