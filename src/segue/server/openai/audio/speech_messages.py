"""The messages of `/v1/audio/speech/stream`, in the form of vllm-omni.

From the client: `session.config`, `input.text`, `input.done`, `session.close`. To the client: `audio.start`, the audio
as binary messages, `audio.done`, `session.done`, `error`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.messages.errors import nearest, wrong
from segue.messages.request import Request
from segue.orchestrator.service import ModelCard
from segue.server.generation.parameters import parse_body
from segue.server.openai.audio.speech_request import PCM_RATE, SpeechOptions, SpeechRequest, speech_options
from segue.server.settings import ServerSettings

FROM_CLIENT = ("session.config", "input.text", "input.done", "session.close")
"""Values of a client's `type`."""
SPLITS = ("sentence", "none")
"""Values of `split_granularity`. By default a text goes on, if the model takes text that is appended to a running
request; else it is said by sentences."""
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "stream_format": (),
    "task_type": (),
    "max_new_tokens": (),
    "initial_codec_chunk_frames": (),
    "non_streaming_mode": (),
    "speaker_embedding": (),
    "x_vector_only_mode": (False,),
    "word_timestamps": (False,),
}


class SessionOptions(SpeechOptions, kw_only=True):
    """Every parameter of `session.config` that has an effect. null means not given."""

    stream_audio: bool | None = None
    """Send the audio of a sentence in pieces, as it is made, instead of in one message."""
    split_granularity: str | None = None


@dataclass(frozen=True)
class SessionConfig:
    """A checked `session.config`: how the texts after it are said."""

    asked: SpeechRequest
    stream_audio: bool
    split: bool
    """Say a text while it arrives, instead of whole when it is complete."""
    goes_on: bool
    """Say it by one generation that its text is appended to, instead of by sentences."""
    checked: float
    """Unix time, from which the request's deadline counts."""

    def request(self, text: str, begun: float) -> Request:
        """The request that says `text`, a part of a text that was begun at this Unix time."""
        request = self.asked.of_text(text)
        if request.deadline is None:
            return request
        return msgspec.structs.replace(request, deadline=request.deadline + begun - self.checked)


def session_config(values: dict[str, Any], card: ModelCard, settings: ServerSettings) -> SessionConfig:
    """Convert a `session.config`, without its `type`. Blocking (`ref_audio`). Raises `InvalidRequest`."""
    checked = time.time()
    own = parse_body(values, SessionOptions, _UNSUPPORTED, {})
    split = own.split_granularity
    if split is not None and split not in SPLITS:
        raise wrong("split_granularity", split, f"one of {', '.join(SPLITS)}{nearest(split, SPLITS)}")
    options = {name: value for name, value in values.items() if name in SpeechOptions.__struct_fields__}
    if own.response_format is None:
        options["response_format"] = "wav"
    asked = speech_options(options, card, settings)
    goes_on = split is None and card.says is not None and card.says.appends
    return SessionConfig(asked, bool(own.stream_audio), split != "none", goes_on, checked)


def start_message(where: dict[str, int], text: str, config: SessionConfig) -> dict[str, object]:
    """What precedes the audio of a sentence; `where`: its indices."""
    form = config.asked.response_format
    rate = {"sample_rate": PCM_RATE, "channels": 1} if form == "pcm" else {}
    return {"type": "audio.start", **where, "sentence_text": text, "format": form, **rate}
