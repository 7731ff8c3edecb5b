"""Prompts of the published forms, part by part, so that no text of a client becomes a special token.

`turn(role)`: `<|im_start|>role⏎`, and `<|im_end|>⏎` after it. A reply begins with `<|im_start|>assistant⏎`, and then
`<|sostm|>` if it is spoken, `<think>⏎` if the model is to think, else an empty thought.

    a text to say   user: Please convert this text to speech: text                    → <|sostm|>
                    system: …, user: Please convert this text to speech: text(how)    → <think>⏎
    a conversation  system: Your voice should be: recording      only if there is one
                    user: [system message ¶] text and recordings, assistant: reply …
    few shots       [Int]:instruction⏎ (recording ⏎ spoken reply " ¶")… recording ⏎ <|sostm|>

A recording is `<|sosp|>`, a patch per `<|empty|>`, `<|eosp|>`. A spoken reply is `<|sostm|>`, five tokens of its text
and five patches in turn (`<|eot|>` after the text), `<|eostm|>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from segue.engines.contract import Payload
from segue.messages.request import MediaPart, Part, TextPart
from segue.models.speech.mimo_audio.tokens import BEGIN, EMPTY, END, SPOKEN, SPOKEN_END, TEXT_END, TURN, TURN_END, id_of

SAY = {"zh": "请将这段文字转换为语音", "en": "Please convert this text to speech"}
"""What the user asks before a text to say: the first of each published list."""
_STYLE = "你需要根据指定的风格指令和文本内容来生成语音。"
_STYLE_IN_A_VOICE = "你需要根据指定的风格指令和文本内容来生成和语音prompt具有相同音色的语音。你的音色应该是："
_VOICE = "Your voice should be:"
_THOUGHTLESS, _THINKING = "<think>\n\n</think>\n", "<think>\n"
_TURNS = 5
"""Tokens of text, and patches, that alternate in a spoken reply."""


@dataclass
class Script:
    """A prompt under construction. `tokenizer`: with the tokens of speech; `recording`: a recording → (its media item,
    the number of its patches)."""

    tokenizer: Any
    recording: Callable[[MediaPart], tuple[Payload, int]]
    ids: list[int] = field(default_factory=list)
    media: list[Payload] = field(default_factory=list)

    def mark(self, token: str) -> None:
        self.ids.append(id_of(self.tokenizer, token))

    def text(self, text: str) -> None:
        self.ids += self._of(text)

    def open(self, role: str, then: str = "") -> None:
        """Begin a turn; `then`: text that is tokenized together with its role."""
        self.mark(TURN)
        self.text(f"{role}\n{then}")

    def close(self) -> None:
        self.mark(TURN_END)
        self.text("\n")

    def end_turn(self) -> None:
        """End the turn of a reply, whose end the model may have drawn."""
        if self.ids[-1:] == [id_of(self.tokenizer, TURN_END)]:
            self.text("\n")
        else:
            self.close()

    def audio(self, part: MediaPart) -> None:
        item, patches = self.recording(part)
        self.media.append(item)
        self.mark(BEGIN)
        self.ids += [id_of(self.tokenizer, EMPTY)] * patches
        self.mark(END)

    def parts(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, TextPart):
                self.text(part.text)
            else:
                self.audio(part)

    def spoken(self, text: str, part: MediaPart) -> None:
        """A reply of text and speech."""
        item, patches = self.recording(part)
        self.media.append(item)
        ids = self._of(text)
        texts = [ids[at : at + _TURNS] for at in range(0, max(len(ids), 1), _TURNS)]
        texts[-1].append(id_of(self.tokenizer, TEXT_END))
        self.mark(SPOKEN)
        while texts or patches > 0:
            self.ids += texts.pop(0) if texts else []
            self.ids += [id_of(self.tokenizer, EMPTY)] * min(patches, _TURNS)
            patches -= _TURNS
        self.mark(SPOKEN_END)

    def reply(self, *, spoken: bool, thinking: bool) -> None:
        """Begin the reply."""
        self.open("assistant")
        if spoken:
            self.mark(SPOKEN)
        else:
            self.text(_THINKING if thinking else _THOUGHTLESS)

    def say(self, text: str, how: str, voice: MediaPart | None) -> None:
        """A text to say; `how`: instructions, if there are some."""
        said = f"{SAY['zh' if re.search('[一-鿿]', text) else 'en']}: {capitalised(text)}"
        if not how and voice is None:
            self.open("user", said)
            self.close()
            self.reply(spoken=True, thinking=False)
            return
        self.open("system")
        self.text(_STYLE if voice is None else _STYLE_IN_A_VOICE)
        if voice is not None:
            self.audio(voice)
        self.close()
        self.open("user", f"{said}({how})" if how else said)
        self.close()
        self.reply(spoken=False, thinking=True)

    def voice(self, part: MediaPart) -> None:
        """A turn with the voice to reply with."""
        self.open("system")
        self.text(_VOICE)
        self.audio(part)
        self.close()

    def _of(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def capitalised(text: str) -> str:
    """Text that is all in capitals or all in small letters, with the first a capital and the others small."""
    return text.capitalize() if text.isupper() or text.islower() else text
