"""A spoken assistant of three models: one hears, one thinks, one speaks.

    segue tiny whisper out/whisper && segue tiny qwen3 out/qwen3 && segue tiny pocket-tts out/pocket-tts
    segue serve examples/assistant/assistant.py

`MODELS` names the folder of the checkpoints, if it is not `out`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from segue import ModelGraph

CHECKPOINTS = Path(os.environ.get("MODELS", "out"))


def as_question(transcript: str) -> list[dict[str, Any]]:
    """What was heard → the messages for the model that thinks."""
    return [
        {"role": "system", "content": "You are asked by voice. Answer in a few short sentences."},
        {"role": "user", "content": transcript.strip()},
    ]


def aloud(sentence: str) -> str | None:
    """A sentence of the reply → what is said of it: no marks of formatting."""
    plain = "".join(character for character in sentence if character not in "*_#`|")
    return plain if any(character.isalnum() for character in plain) else None


assistant = ModelGraph("assistant")
assistant.model("hear", CHECKPOINTS / "whisper")
assistant.model("think", CHECKPOINTS / "qwen3")
assistant.model("speak", CHECKPOINTS / "pocket-tts")
assistant.edge("hear", "think", transform=as_question)
assistant.edge("think", "speak", transform=aloud)
